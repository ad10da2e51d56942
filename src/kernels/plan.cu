// Steps that every driver takes: see plan.cuh and unit_plan.cuh.

#include "plan.cuh"
#include "unit_plan.cuh"

KERNELS(kvpool_plan, PlanParams) {
    write_plan(p, list);
}

KERNELS(kvpool_unit_plan, UnitPlanParams) {
    write_unit_plan(p, list);
}
