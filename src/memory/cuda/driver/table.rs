//! The table of driver functions, from `libcuda.so.1`: the file that PyTorch and every other CUDA library in
//! the process opens. Each function returns a plain number, since a driver may return codes newer than any
//! header.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::transmute;
use std::sync::OnceLock;

use cudarc::driver::sys;

use super::entry_points::entry_points;
use super::handles::{
    CaptureMode, CaptureStatus, Code, ContextHandle, Copy2d, DeviceAttribute, DevicePtr, EventHandle,
    FunctionAttribute, FunctionHandle, LookupStatus, ModuleHandle, PointerAttribute, StreamHandle, Text,
};

const LIBRARY: &CStr = c"libcuda.so.1";

/// The oldest version with every function of the table: CUDA 12.0.
const OLDEST: c_int = 12_000;

/// Maps a type of kvpool to its type in the header.
trait HeaderType {
    type For;
}

/// The header type of `T`.
type Header<T> = <T as HeaderType>::For;

macro_rules! stands {
    ($($ours:ty => $theirs:ty;)*) => {
        $(impl HeaderType for $ours {
            type For = $theirs;
        }
        const _: () = assert!(size_of::<$ours>() == size_of::<$theirs>());
        const _: () = assert!(align_of::<$ours>() == align_of::<$theirs>());)*
    };
}

stands! {
    u8 => u8;
    i8 => i8; // `c_char` is one of the two
    c_int => c_int;
    c_uint => c_uint;
    u64 => sys::cuuint64_t;
    usize => usize;
    c_void => c_void;
    CaptureMode => sys::CUstreamCaptureMode;
    CaptureStatus => sys::CUstreamCaptureStatus;
    Code => sys::CUresult;
    ContextHandle => sys::CUcontext;
    Copy2d => sys::CUDA_MEMCPY2D;
    DeviceAttribute => sys::CUdevice_attribute;
    DevicePtr => sys::CUdeviceptr;
    EventHandle => sys::CUevent;
    FunctionAttribute => sys::CUfunction_attribute;
    FunctionHandle => sys::CUfunction;
    LookupStatus => sys::CUdriverProcAddressQueryResult;
    ModuleHandle => sys::CUmodule;
    PointerAttribute => sys::CUpointer_attribute;
    StreamHandle => sys::CUstream;
    Text => *const c_char;
}

const _: () =
    assert!(std::mem::offset_of!(Copy2d, target) == std::mem::offset_of!(sys::CUDA_MEMCPY2D, dstXInBytes));
const _: () =
    assert!(std::mem::offset_of!(Copy2d, width) == std::mem::offset_of!(sys::CUDA_MEMCPY2D, WidthInBytes));

impl<T: HeaderType> HeaderType for *mut T {
    type For = *mut Header<T>;
}

impl<T: HeaderType> HeaderType for *const T {
    type For = *const Header<T>;
}

macro_rules! define {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {
        /// The functions.
        #[derive(Debug)]
        #[expect(non_snake_case, reason = "the driver's names")]
        pub(super) struct Table {
            $($name: unsafe extern "C" fn($($kind),*) -> Code,)*
        }

        // The parameter types are compared with those of the header at compile time.
        $(const _: unsafe fn($(Header<$kind>),*) -> sys::CUresult = sys::$name;)*

        #[expect(non_snake_case, reason = "the driver's names")]
        impl Table {
            /// Looks up every function, or returns the name of the first missing one.
            fn of(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        const NAME: &str = concat!(stringify!($name), "\0");
                        let found = library.find(NAME).ok_or(stringify!($name))?;
                        // SAFETY: the library's function of this name takes what the header says, as compared
                        // above, and returns a number of 32 bits.
                        unsafe { transmute::<*mut c_void, unsafe extern "C" fn($($kind),*) -> Code>(found) }
                    },)*
                })
            }

            $(#[allow(clippy::too_many_arguments, reason = "the driver's")]
            pub(super) unsafe fn $name(&self, $($argument: $kind),*) -> Code {
                // SAFETY: the caller guarantees what the driver requires.
                unsafe { (self.$name)($($argument),*) }
            })*
        }
    };
}
entry_points!(define);

/// The driver's library, which is never closed.
struct Library(*mut c_void);

impl Library {
    fn open() -> Option<Self> {
        // SAFETY: the name ends with a zero. The library runs its constructors, as it does in every process
        // that opens it.
        let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        (!library.is_null()).then_some(Self(library))
    }

    /// Looks up a function by `name`, which ends with a zero.
    fn find(&self, name: &str) -> Option<*mut c_void> {
        let name = CStr::from_bytes_with_nul(name.as_bytes()).ok()?;
        // SAFETY: the library is open, and the name ends with a zero.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    }

    /// Returns the version that the library reports, if any.
    fn version(&self) -> Option<c_int> {
        let found = self.find("cuDriverGetVersion\0")?;
        // SAFETY: as in `Table::of`.
        let ask = unsafe { transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> Code>(found) };
        let mut version = 0;
        // SAFETY: the function writes the version there.
        let code = unsafe { ask(&raw mut version) };
        (code == Code::SUCCESS).then_some(version)
    }
}

impl Table {
    /// Returns the table of this process. Parts that are missing are looked up again by the next call.
    ///
    /// # Errors
    /// A description of the missing part.
    pub(super) fn open() -> Result<&'static Self, String> {
        static TABLE: OnceLock<Table> = OnceLock::new();
        if let Some(table) = TABLE.get() {
            return Ok(table);
        }
        let library = Library::open().ok_or(
            "no NVIDIA driver: libcuda.so.1 was not found by the dynamic loader; device=\"cpu\" needs none",
        )?;
        if let Some(version) = library.version()
            && version < OLDEST
        {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            return Err(format!("the NVIDIA driver offers CUDA {major}.{minor}; at least 12.0 is needed"));
        }
        let table = Self::of(&library)
            .map_err(|name| format!("kvpool cannot use the library libcuda.so.1: it has no {name}"))?;
        Ok(TABLE.get_or_init(|| table))
    }
}
