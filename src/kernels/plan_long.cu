// Steps with more numbers than fit in 4 KiB of parameters, for drivers from CUDA 12.1 on: they take 32,764 bytes. The
// structures have addresses, so their sizes are multiples of 8. A launch copies all that its kernel declares, so there is a
// size for the usual large batches, too.

#include "plan.cuh"
#include "unit_plan.cuh"

typedef WithList<PlanParams, 12288> LongPlan;
static_assert(sizeof(LongPlan) == 12288, "as launch/numbers.rs has it");

typedef WithList<PlanParams, 32760> LongestPlan;
static_assert(sizeof(LongestPlan) == 32760, "as launch/numbers.rs has it");

KERNEL(kvpool_plan_long, LongPlan) {
    write_plan(p.params, p.list);
}

KERNEL(kvpool_plan_longest, LongestPlan) {
    write_plan(p.params, p.list);
}

typedef WithList<UnitPlanParams, 12288> LongUnitPlan;
static_assert(sizeof(LongUnitPlan) == 12288, "as launch/numbers.rs has it");

typedef WithList<UnitPlanParams, 32760> LongestUnitPlan;
static_assert(sizeof(LongestUnitPlan) == 32760, "as launch/numbers.rs has it");

KERNEL(kvpool_unit_plan_long, LongUnitPlan) {
    write_unit_plan(p.params, p.list);
}

KERNEL(kvpool_unit_plan_longest, LongestUnitPlan) {
    write_unit_plan(p.params, p.list);
}
