//! The kernels of the crate, loaded on a device.

use std::ffi::CStr;
use std::sync::{Arc, Mutex};

use crate::base::sync::lock;
use crate::base::{Device, Result};
use crate::memory::{Function, Gpu};

use super::images::{Compiled, PLAN, ROWS, TABLE};

/// A kernel that takes numbers from the host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    /// Takes them in device memory, or takes none.
    pub(super) copied: Function,
    /// Takes them behind its parameters.
    pub(super) listed: Function,
}

/// The kernels, loaded on one device.
#[derive(Debug)]
pub(super) struct Kernels {
    device: Device,
    pub(super) plan: Kernel,
    pub(super) store: Kernel,
    pub(super) gather: Kernel,
    pub(super) copy: Kernel,
    pub(super) copy_in_order: Kernel,
    pub(super) zero: Kernel,
    pub(super) write_points: Kernel,
    pub(super) write_ragged: Kernel,
    pub(super) kv_indices: Kernel,
    pub(super) continue_pages: Function,
    pub(super) copy_pages: Function,
    pub(super) read_indices: Function,
}

impl Kernels {
    /// The kernels of `gpu`, loaded by the first call.
    pub(super) fn of(gpu: &Gpu) -> Result<Arc<Self>> {
        static LOADED: Mutex<Vec<Arc<Kernels>>> = Mutex::new(Vec::new());
        let mut loaded = lock(&LOADED);
        if let Some(kernels) = loaded.iter().find(|kernels| kernels.device == gpu.device()) {
            return Ok(Arc::clone(kernels));
        }
        let [plan, plan_listed] = load(gpu, &PLAN, [c"kvpool_plan", c"kvpool_plan_listed"])?;
        let rows = [
            c"kvpool_store",
            c"kvpool_store_listed",
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
            c"kvpool_write_ragged",
            c"kvpool_write_ragged_listed",
            c"kvpool_kv_indices",
            c"kvpool_kv_indices_listed",
            c"kvpool_read_indices",
            c"kvpool_continue_pages",
        ];
        let [
            points,
            points_listed,
            ragged,
            ragged_listed,
            kv_indices,
            kv_indices_listed,
            read_indices,
            continue_pages,
        ] = load(gpu, &TABLE, table)?;
        let kernels = Arc::new(Self {
            device: gpu.device(),
            plan: Kernel { copied: plan, listed: plan_listed },
            store: Kernel { copied: store, listed: store_listed },
            gather: Kernel { copied: gather, listed: gather_listed },
            copy: Kernel { copied: copy, listed: copy_listed },
            copy_in_order: Kernel { copied: ordered, listed: ordered_listed },
            zero: Kernel { copied: zero, listed: zero_listed },
            write_points: Kernel { copied: points, listed: points_listed },
            write_ragged: Kernel { copied: ragged, listed: ragged_listed },
            kv_indices: Kernel { copied: kv_indices, listed: kv_indices_listed },
            continue_pages,
            copy_pages,
            read_indices,
        });
        loaded.push(Arc::clone(&kernels));
        Ok(kernels)
    }
}

fn load<const N: usize>(gpu: &Gpu, compiled: &Compiled, names: [&CStr; N]) -> Result<[Function; N]> {
    gpu.load(&compiled.images(gpu), names)
}
