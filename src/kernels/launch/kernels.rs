//! The kernels of the crate, loaded on a device.

use std::ffi::CStr;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};

use crate::base::sync::lock;
use crate::base::{Device, Result};
use crate::memory::{Function, Gpu};

use super::images::{Compiled, PLAN, PLAN_LONG, ROWS, TABLE};
use super::numbers::{LONG_PARAMS, LONG_PARAMS_SINCE, LONGEST_PARAMS, WithList};
use super::params::{
    ColumnsParams, ContinueParams, GatherParams, KvIndicesParams, MoveParams, OrderParams, PagesParams,
    PlanParams, PointsParams, ReadParams, RunsParams, StoreParams, UnitPlanParams, ZeroParams,
};

/// A kernel that takes a `P`, its only parameter.
pub(super) struct TypedFunction<P> {
    function: Function,
    takes: PhantomData<fn(P)>,
}

impl<P> TypedFunction<P> {
    /// Returns the kernel `function`, whose C++ parameter has the layout of `P`.
    const fn new(function: Function) -> Self {
        Self { function, takes: PhantomData }
    }

    pub(super) const fn function(self) -> Function {
        self.function
    }
}

impl<P> Clone for TypedFunction<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for TypedFunction<P> {}

impl<P> fmt::Debug for TypedFunction<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TypedFunction").field(&self.function).finish()
    }
}

/// A kernel that takes a `P`, and perhaps numbers from the host.
pub(super) struct Kernel<P> {
    /// Takes the numbers in device memory, or takes none.
    pub(super) copied: TypedFunction<P>,
    /// Takes the numbers after its parameters.
    pub(super) listed: TypedFunction<WithList<P>>,
}

impl<P> Kernel<P> {
    const fn new(copied: Function, listed: Function) -> Self {
        Self { copied: TypedFunction::new(copied), listed: TypedFunction::new(listed) }
    }
}

impl<P> Clone for Kernel<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for Kernel<P> {}

impl<P> fmt::Debug for Kernel<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").field("copied", &self.copied).field("listed", &self.listed).finish()
    }
}

/// A kernel for plans with longer parameters than those of [`Kernel`].
pub(super) struct LongKernel<P> {
    pub(super) long: TypedFunction<WithList<P, LONG_PARAMS>>,
    pub(super) longest: TypedFunction<WithList<P, LONGEST_PARAMS>>,
}

impl<P> LongKernel<P> {
    const fn new([long, longest]: [Function; 2]) -> Self {
        Self { long: TypedFunction::new(long), longest: TypedFunction::new(longest) }
    }
}

impl<P> Clone for LongKernel<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for LongKernel<P> {}

impl<P> fmt::Debug for LongKernel<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LongKernel").field("long", &self.long).field("longest", &self.longest).finish()
    }
}

/// The kernels with longer parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct LongPlans {
    pub(super) plan: LongKernel<PlanParams>,
    pub(super) unit_plan: LongKernel<UnitPlanParams>,
}

impl LongPlans {
    /// Returns the kernels, if the driver accepts their parameters.
    fn load(gpu: &Gpu) -> Result<Option<Self>> {
        if gpu.driver_version()? < LONG_PARAMS_SINCE {
            return Ok(None);
        }
        let names = [
            c"kvpool_plan_long",
            c"kvpool_plan_longest",
            c"kvpool_unit_plan_long",
            c"kvpool_unit_plan_longest",
        ];
        let [long, longest, unit_long, unit_longest] = load(gpu, &PLAN_LONG, names)?;
        Ok(Some(Self {
            plan: LongKernel::new([long, longest]),
            unit_plan: LongKernel::new([unit_long, unit_longest]),
        }))
    }
}

/// The kernels, loaded on one device.
#[derive(Debug)]
pub(super) struct Kernels {
    device: Device,
    pub(super) plan: Kernel<PlanParams>,
    pub(super) unit_plan: Kernel<UnitPlanParams>,
    pub(super) long_plans: Option<LongPlans>,
    pub(super) store: Kernel<StoreParams>,
    /// `store` of values that are all stored in words of 16 bytes.
    pub(super) store_wide: Kernel<StoreParams>,
    /// `store` of runs of 16-bit floats that all become 8-bit floats.
    pub(super) store_narrowed: Kernel<StoreParams>,
    pub(super) gather: Kernel<GatherParams>,
    pub(super) copy: Kernel<MoveParams>,
    pub(super) copy_in_order: Kernel<OrderParams>,
    pub(super) zero: Kernel<ZeroParams>,
    pub(super) write_points: Kernel<PointsParams>,
    pub(super) zero_columns: Kernel<ColumnsParams>,
    pub(super) kv_indices: Kernel<KvIndicesParams>,
    pub(super) continue_pages: TypedFunction<WithList<ContinueParams>>,
    pub(super) copy_pages: TypedFunction<WithList<PagesParams>>,
    pub(super) read_indices: TypedFunction<ReadParams>,
    pub(super) list_runs: TypedFunction<WithList<RunsParams>>,
}

impl Kernels {
    /// Returns the kernels of `gpu`, loaded by the first call.
    pub(super) fn of(gpu: &Gpu) -> Result<Arc<Self>> {
        static LOADED: Mutex<Vec<Arc<Kernels>>> = Mutex::new(Vec::new());
        let mut loaded = lock(&LOADED);
        if let Some(kernels) = loaded.iter().find(|kernels| kernels.device == gpu.device()) {
            return Ok(Arc::clone(kernels));
        }
        let plan = [c"kvpool_plan", c"kvpool_plan_listed", c"kvpool_unit_plan", c"kvpool_unit_plan_listed"];
        let [plan, plan_listed, unit_plan, unit_plan_listed] = load(gpu, &PLAN, plan)?;
        let long_plans = LongPlans::load(gpu)?;
        let rows = [
            c"kvpool_store",
            c"kvpool_store_listed",
            c"kvpool_store_wide",
            c"kvpool_store_wide_listed",
            c"kvpool_store_narrowed",
            c"kvpool_store_narrowed_listed",
            c"kvpool_gather",
            c"kvpool_gather_listed",
            c"kvpool_move",
            c"kvpool_move_listed",
            c"kvpool_move_in_order",
            c"kvpool_move_in_order_listed",
            c"kvpool_zero",
            c"kvpool_zero_listed",
            c"kvpool_copy_pages",
        ];
        let [
            store,
            store_listed,
            store_wide,
            store_wide_listed,
            store_narrowed,
            store_narrowed_listed,
            gather,
            gather_listed,
            copy,
            copy_listed,
            ordered,
            ordered_listed,
            zero,
            zero_listed,
            copy_pages,
        ] = load(gpu, &ROWS, rows)?;
        let table = [
            c"kvpool_write_points",
            c"kvpool_write_points_listed",
            c"kvpool_zero_columns",
            c"kvpool_zero_columns_listed",
            c"kvpool_kv_indices",
            c"kvpool_kv_indices_listed",
            c"kvpool_read_indices",
            c"kvpool_continue_pages",
            c"kvpool_list_runs",
        ];
        let [
            points,
            points_listed,
            columns,
            columns_listed,
            kv_indices,
            kv_indices_listed,
            read_indices,
            continue_pages,
            list_runs,
        ] = load(gpu, &TABLE, table)?;
        let kernels = Arc::new(Self {
            device: gpu.device(),
            plan: Kernel::new(plan, plan_listed),
            unit_plan: Kernel::new(unit_plan, unit_plan_listed),
            long_plans,
            store: Kernel::new(store, store_listed),
            store_wide: Kernel::new(store_wide, store_wide_listed),
            store_narrowed: Kernel::new(store_narrowed, store_narrowed_listed),
            gather: Kernel::new(gather, gather_listed),
            copy: Kernel::new(copy, copy_listed),
            copy_in_order: Kernel::new(ordered, ordered_listed),
            zero: Kernel::new(zero, zero_listed),
            write_points: Kernel::new(points, points_listed),
            zero_columns: Kernel::new(columns, columns_listed),
            kv_indices: Kernel::new(kv_indices, kv_indices_listed),
            continue_pages: TypedFunction::new(continue_pages),
            copy_pages: TypedFunction::new(copy_pages),
            read_indices: TypedFunction::new(read_indices),
            list_runs: TypedFunction::new(list_runs),
        });
        loaded.push(Arc::clone(&kernels));
        Ok(kernels)
    }
}

fn load<const N: usize>(gpu: &Gpu, compiled: &Compiled, names: [&CStr; N]) -> Result<[Function; N]> {
    gpu.load(&compiled.images(gpu)?, names)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::kernels::launch::numbers::PARAMS;

    /// The bytes of the parameter of `P` alone, and of that with a list of the usual length.
    fn both<P>(name: &'static str, listed: &'static str) -> [(&'static str, usize); 2] {
        [(name, size_of::<P>()), (listed, PARAMS * size_of::<i32>())]
    }

    /// A driver reads as many bytes of the parameters as a kernel declares.
    #[test]
    fn parameters_are_as_long_as_kernels_declare() {
        let mut expected: BTreeMap<&str, usize> = [
            both::<PlanParams>("kvpool_plan", "kvpool_plan_listed"),
            both::<UnitPlanParams>("kvpool_unit_plan", "kvpool_unit_plan_listed"),
            both::<StoreParams>("kvpool_store", "kvpool_store_listed"),
            both::<StoreParams>("kvpool_store_wide", "kvpool_store_wide_listed"),
            both::<StoreParams>("kvpool_store_narrowed", "kvpool_store_narrowed_listed"),
            both::<GatherParams>("kvpool_gather", "kvpool_gather_listed"),
            both::<MoveParams>("kvpool_move", "kvpool_move_listed"),
            both::<OrderParams>("kvpool_move_in_order", "kvpool_move_in_order_listed"),
            both::<ZeroParams>("kvpool_zero", "kvpool_zero_listed"),
            both::<PointsParams>("kvpool_write_points", "kvpool_write_points_listed"),
            both::<ColumnsParams>("kvpool_zero_columns", "kvpool_zero_columns_listed"),
            both::<KvIndicesParams>("kvpool_kv_indices", "kvpool_kv_indices_listed"),
        ]
        .into_iter()
        .flatten()
        .collect();
        expected.extend([
            ("kvpool_plan_long", LONG_PARAMS * size_of::<i32>()),
            ("kvpool_plan_longest", LONGEST_PARAMS * size_of::<i32>()),
            ("kvpool_unit_plan_long", LONG_PARAMS * size_of::<i32>()),
            ("kvpool_unit_plan_longest", LONGEST_PARAMS * size_of::<i32>()),
            ("kvpool_copy_pages", PARAMS * size_of::<i32>()),
            ("kvpool_continue_pages", PARAMS * size_of::<i32>()),
            ("kvpool_list_runs", PARAMS * size_of::<i32>()),
            ("kvpool_read_indices", size_of::<ReadParams>()),
        ]);
        let declared = [PLAN, PLAN_LONG, ROWS, TABLE];
        let declared: BTreeMap<&str, usize> = declared.iter().flat_map(Compiled::params_bytes).collect();
        assert_eq!(declared, expected);
    }
}
