//! The record in which kernels report an invalid number that only the device has.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::base::Result;
use crate::memory::{Contents, Gpu, PageLockedHost, Region, StreamSet};

/// `Fault` of `params.cuh`, in page-locked memory.
#[derive(Debug)]
pub(super) struct FaultRecord(Region);

/// The kind of an invalid number, as `params.cuh` numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FaultKind {
    /// 1: an index of rows.
    Row,
    /// 2: an index of columns.
    Column,
    /// 3: a value that does not fit int32.
    Value,
    /// 4: a last slot that does not end its request.
    LastLoc,
}

/// An invalid number that a kernel found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) kind: FaultKind,
    /// The position of the number in its batch.
    pub(super) position: i64,
    /// The number.
    pub(super) value: i64,
}

impl FaultKind {
    const fn of(code: i64) -> Self {
        match code & 0xff {
            1 => Self::Row,
            2 => Self::Column,
            4 => Self::LastLoc,
            _ => Self::Value,
        }
    }
}

impl FaultRecord {
    /// Creates a record without a fault. `users` are the streams of the kernels.
    pub(super) fn new(gpu: &Arc<Gpu>, users: &Arc<StreamSet>) -> Result<Self> {
        let bytes = 2 * size_of::<AtomicI64>();
        Region::with(Arc::new(PageLockedHost::new(gpu)), bytes, Contents::Zeros, Arc::clone(users)).map(Self)
    }

    /// Returns the address of the record, for kernels.
    pub(super) fn address(&self) -> *mut c_void {
        self.0.address().as_ptr().cast()
    }

    /// Takes the fault, if there is one. Kernels and other threads may use the record at the same time: a
    /// fault is returned once, and one that is reported meanwhile stays for the next call.
    pub(super) fn take(&self) -> Option<Fault> {
        let [code, value] = self.words();
        let mut found = code.load(Ordering::Acquire);
        while found != 0 {
            let value = value.load(Ordering::Acquire);
            match code.compare_exchange(found, 0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(Fault { kind: FaultKind::of(found), position: found >> 8, value }),
                Err(newer) => found = newer,
            }
        }
        None
    }

    /// Returns the position and the kind, 0 for no fault; and the value.
    const fn words(&self) -> &[AtomicI64; 2] {
        // SAFETY: the region has two aligned numbers of 64 bits, zeroed at first. The host accesses them as
        // atomics only, and a kernel writes both in one store.
        unsafe { self.0.address().cast::<[AtomicI64; 2]>().as_ref() }
    }
}
