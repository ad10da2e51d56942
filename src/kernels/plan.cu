// Steps that every driver takes: see plan.cuh.

#include "plan.cuh"

KERNELS(kvpool_plan, PlanParams) {
    write_plan(p, list);
}
