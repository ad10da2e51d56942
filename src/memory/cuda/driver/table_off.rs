//! The table of driver functions in a build without the feature `cuda`: it has no values, so it never opens.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::entry_points::entry_points;
use super::handles::{
    CaptureMode, CaptureStatus, Code, ContextHandle, Copy2d, DeviceAttribute, DevicePtr, EventHandle,
    FunctionAttribute, FunctionHandle, LookupStatus, ModuleHandle, PointerAttribute, StreamHandle, Text,
};

/// The driver functions. The type has no values.
#[derive(Debug)]
pub(super) enum Table {}

macro_rules! define {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {
        #[expect(non_snake_case, reason = "the driver's names")]
        impl Table {
            $(#[allow(clippy::too_many_arguments, reason = "the driver's")]
            pub(super) unsafe fn $name(&self, $($argument: $kind),*) -> Code {
                $(let _ = $argument;)*
                match *self {}
            })*
        }
    };
}
entry_points!(define);

impl Table {
    pub(super) fn open() -> Result<&'static Self, String> {
        Err("kvpool was built without the `cuda` feature; device=\"cpu\" needs none".to_owned())
    }
}
