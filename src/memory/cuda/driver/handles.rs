//! Parameters and results of driver functions, each a type of its own.
//!
//! All are numbers of the size that the driver's header specifies, so they can be sent between threads; the
//! table checks them against that header.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

use crate::base::Result;
use crate::memory::Stream;

/// A result code of the driver: any number, including codes newer than every header.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::memory::cuda) struct Code(pub(in crate::memory::cuda) u32);

impl Code {
    pub(super) const SUCCESS: Self = Self(0);
    pub(super) const INVALID_VALUE: Self = Self(1);
    pub(super) const OUT_OF_MEMORY: Self = Self(2);
    pub(super) const INVALID_HANDLE: Self = Self(400);
    pub(super) const NOT_READY: Self = Self(600);
    pub(super) const ALREADY_REGISTERED: Self = Self(712);
    pub(super) const CAPTURE_IMPLICIT: Self = Self(906);
    /// Codes after which another image may work: the image is for another architecture, or newer than the
    /// driver.
    pub(super) const UNSUITABLE_IMAGES: [Self; 4] = [Self(200), Self(209), Self(218), Self(222)];
}

/// Handles that the driver creates.
macro_rules! handles {
    ($($(#[$about:meta])* $name:ident;)*) => {
        $($(#[$about])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(in crate::memory::cuda) struct $name(usize);

        impl $name {
            /// The value before the driver fills it in.
            pub(super) const NONE: Self = Self(0);
        })*
    };
}

handles! {
    /// `CUcontext`.
    ContextHandle;
    /// `CUevent`.
    EventHandle;
    /// `CUfunction`.
    FunctionHandle;
    /// `CUmodule`.
    ModuleHandle;
}

/// `CUstream`, of any creator.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamHandle(usize);

impl StreamHandle {
    /// The value before the driver fills it in.
    pub(super) const NONE: Self = Self(0);
}

impl From<Stream> for StreamHandle {
    fn from(stream: Stream) -> Self {
        Self(stream.handle())
    }
}

impl StreamHandle {
    /// Returns the stream of a handle that the driver made on device `ordinal`, and that no call destroys.
    pub(super) fn stream(self, ordinal: u32) -> Result<Stream> {
        // SAFETY: guaranteed by the caller.
        unsafe { Stream::from_handle(self.0, ordinal) }
    }
}

/// `CUdeviceptr`: an address of a device, or of host memory that it reaches.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::memory::cuda) struct DevicePtr(pub(super) u64);

impl DevicePtr {
    /// Returns the address of `pointer`.
    pub(in crate::memory::cuda) fn of(pointer: *const u8) -> Self {
        // CUDA exists on 64-bit machines only.
        Self(pointer.addr() as u64)
    }

    /// Returns the address as a pointer, for blocks; the host never dereferences it.
    pub(in crate::memory::cuda) fn pointer(self) -> *mut u8 {
        ptr::without_provenance_mut(usize::try_from(self.0).expect("addresses have 64 bits at most"))
    }
}

/// `CUstreamCaptureMode`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct CaptureMode(pub(super) c_int);

impl CaptureMode {
    pub(super) const RELAXED: Self = Self(2);
}

/// `CUstreamCaptureStatus`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CaptureStatus(pub(super) c_int);

impl CaptureStatus {
    pub(super) const NONE: Self = Self(0);
}

/// `CUdriverProcAddressQueryResult`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct LookupStatus(pub(super) c_int);

/// `CUfunction_attribute`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct FunctionAttribute(c_int);

impl FunctionAttribute {
    /// An attribute whose query loads the function, according to the header.
    pub(super) const MAX_THREADS_PER_BLOCK: Self = Self(0);
}

/// `CUdevice_attribute`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceAttribute(c_int);

impl DeviceAttribute {
    pub(super) const CAPABILITY_MAJOR: Self = Self(75);
    pub(super) const CAPABILITY_MINOR: Self = Self(76);
    /// `CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM`.
    pub(super) const USES_HOST_POINTERS: Self = Self(91);
}

/// `CUpointer_attribute`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct PointerAttribute(c_uint);

impl PointerAttribute {
    pub(super) const MEMORY_TYPE: Self = Self(2);
}

/// `CUmemorytype`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryType(c_uint);

impl MemoryType {
    pub(super) const HOST: Self = Self(1);
    pub(super) const DEVICE: Self = Self(2);
}

/// One side of `CUDA_MEMCPY2D`: rows of bytes in memory of the host or of a device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Side {
    pub(super) x: usize,
    pub(super) y: usize,
    pub(super) kind: MemoryType,
    pub(super) host: *mut c_void,
    pub(super) device: DevicePtr,
    pub(super) array: *mut c_void,
    pub(super) pitch: usize,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy2d {
    pub(super) source: Side,
    pub(super) target: Side,
    pub(super) width: usize,
    pub(super) height: usize,
}

/// A constant string of the driver, or null.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Text(*const c_char);

impl Text {
    pub(super) const NONE: Self = Self(ptr::null());

    pub(super) fn read(self) -> Option<String> {
        // SAFETY: the driver returns null or a string that ends with a zero and lives as long as the process.
        (!self.0.is_null()).then(|| unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}
