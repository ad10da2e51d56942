//! The driver's functions. Every result is checked, and an error names the function.
//!
//! A [`Driver`] exists only if all functions of its table were found, so no call can fail because one is
//! missing. The caller must have made the right context current; each method documents further requirements.

mod entry_points;
mod handles;
#[cfg(feature = "cuda")]
mod table;
#[cfg(not(feature = "cuda"))]
#[path = "driver/table_off.rs"]
mod table;

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr;

use crate::base::{Error, ErrorKind, Result, unlock_interpreter};
use crate::memory::Stream;

use super::host_wait::HostWait;
use handles::{
    CaptureMode, CaptureStatus, Code, Copy2d, DeviceAttribute, FunctionAttribute, LookupStatus, MemoryType,
    PointerAttribute, Side, StreamHandle, Text,
};
pub(super) use handles::{ContextHandle, DevicePtr, EventHandle, FunctionHandle, ModuleHandle};
use table::Table;

/// `CU_MEMHOSTALLOC_PORTABLE` and `CU_MEMHOSTALLOC_DEVICEMAP`: every context and every kernel may use it. The
/// flags of registration have the same values.
const PORTABLE_AND_MAPPED: u32 = 1 | 2;
/// `CU_EVENT_BLOCKING_SYNC`: a thread that waits for the event sleeps.
const BLOCKING_SYNC: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;
/// `CU_STREAM_NON_BLOCKING`: the stream and the default stream do not wait for each other.
const NON_BLOCKING: u32 = 1;

/// The effect of enqueueing work on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamState {
    /// The work runs.
    Running,
    /// The work becomes part of a graph or, on the default stream, would have to.
    Captured,
    /// There is no effect: the stream was destroyed.
    Destroyed,
}

/// One side of a copy of rows of bytes that lie `pitch` bytes apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub(super) address: *mut u8,
    pub(super) pitch: usize,
    /// Whether the address is one of host memory.
    pub(super) is_on_host: bool,
}

impl Rows {
    const fn side(self, device: DevicePtr) -> Side {
        let kind = if self.is_on_host { MemoryType::HOST } else { MemoryType::DEVICE };
        Side {
            x: 0,
            y: 0,
            kind,
            host: self.address.cast(),
            device,
            array: ptr::null_mut(),
            pitch: self.pitch,
        }
    }
}

/// The NVIDIA driver of this machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Driver(&'static Table);

/// Lets this thread, while it lives, make calls that CUDA otherwise forbids to all threads during a capture,
/// as they may be unsafe while another thread captures: freeing memory, for example, or querying an event of
/// another stream.
pub(super) struct RelaxedThread {
    driver: Driver,
    previous: CaptureMode,
}

/// Calls a function of the table, which is unsafe, and turns its code into a `Result`.
macro_rules! checked {
    ($driver:expr, $name:ident($($argument:expr),*)) => {
        $driver.check(stringify!($name), $driver.0.$name($($argument),*))
    };
}

/// Works like `checked`, for a function that may wait: for the device, or for room in its queue of work. The
/// lock of an interpreter is released meanwhile, which the work before may need.
macro_rules! waiting {
    ($driver:expr, $name:ident($($argument:expr),*)) => {{
        let unlocked = unlock_interpreter();
        let code = $driver.0.$name($($argument),*);
        drop(unlocked);
        $driver.check(stringify!($name), code)
    }};
}

impl Driver {
    /// Opens the driver.
    ///
    /// # Errors
    /// A description of the missing part.
    pub(super) fn open() -> std::result::Result<Self, String> {
        Table::open().map(Self)
    }

    fn check(self, call: &str, code: Code) -> Result<()> {
        if code == Code::SUCCESS { Ok(()) } else { Err(self.call_error(call, code)) }
    }

    /// Returns the error for a failed call: its code, and the driver's name for the code.
    #[cold]
    fn call_error(self, call: &str, code: Code) -> Error {
        let mut name = Text::NONE;
        // SAFETY: the function writes a constant string, or null for an unknown code.
        let code_of_name = unsafe { self.0.cuGetErrorName(code, &raw mut name) };
        let name = if code_of_name == Code::SUCCESS { name.read() } else { None };
        let name = name.unwrap_or_else(|| "a code that the driver has no name for".to_owned());
        Error::new(ErrorKind::Driver, format!("{call} failed with {name} ({})", code.0)).with_code(code.0)
    }

    /// Initialises the driver, which every other call requires.
    pub(super) fn init(self) -> Result<()> {
        // SAFETY: the function takes no address.
        unsafe { checked!(self, cuInit(0)) }
    }

    /// Returns the version of CUDA that the driver offers, major and minor.
    pub(super) fn version(self) -> Result<(u32, u32)> {
        let mut version = 0;
        // SAFETY: the function writes a number there.
        unsafe { checked!(self, cuDriverGetVersion(&raw mut version)) }?;
        let version = counted(version);
        Ok((version / 1000, version % 1000 / 10))
    }

    pub(super) fn relax(self) -> Result<RelaxedThread> {
        let mut previous = CaptureMode::RELAXED;
        // SAFETY: the function reads and writes a mode there.
        unsafe { checked!(self, cuThreadExchangeStreamCaptureMode(&raw mut previous)) }?;
        Ok(RelaxedThread { driver: self, previous })
    }

    pub(super) fn device_count(self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: the function writes a number there.
        unsafe { checked!(self, cuDeviceGetCount(&raw mut count)) }?;
        Ok(counted(count))
    }

    fn device(self, ordinal: u32) -> Result<c_int> {
        let ordinal = c_int::try_from(ordinal)
            .map_err(|_| Error::config(format!("{ordinal} is not a device number")))?;
        let mut device = 0;
        // SAFETY: the function writes a number there.
        unsafe { checked!(self, cuDeviceGet(&raw mut device, ordinal)) }?;
        Ok(device)
    }

    /// Returns the primary context of device `ordinal`, kept for the life of the process.
    pub(super) fn retain_context(self, ordinal: u32) -> Result<ContextHandle> {
        let device = self.device(ordinal)?;
        let mut context = ContextHandle::NONE;
        // SAFETY: the function writes a handle there; `device` is one of the driver's.
        unsafe { waiting!(self, cuDevicePrimaryCtxRetain(&raw mut context, device)) }?;
        Ok(context)
    }

    /// Returns whether the primary context of device `ordinal` is active in this process.
    pub(super) fn has_context(self, ordinal: u32) -> Result<bool> {
        let device = self.device(ordinal)?;
        let (mut flags, mut is_active) = (0, 0);
        // SAFETY: the function writes two numbers there; `device` is one of the driver's.
        unsafe { checked!(self, cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut is_active)) }?;
        Ok(is_active != 0)
    }

    /// Returns the compute capability of device `ordinal`, major and minor.
    pub(super) fn capability(self, ordinal: u32) -> Result<(u32, u32)> {
        let device = self.device(ordinal)?;
        let ask = |attribute| self.attribute(device, attribute).map(counted);
        Ok((ask(DeviceAttribute::CAPABILITY_MAJOR)?, ask(DeviceAttribute::CAPABILITY_MINOR)?))
    }

    /// Returns whether kernels on device `ordinal` reach host memory that was page-locked in place at its
    /// host address.
    pub(super) fn uses_host_pointers(self, ordinal: u32) -> Result<bool> {
        let device = self.device(ordinal)?;
        Ok(self.attribute(device, DeviceAttribute::USES_HOST_POINTERS)? != 0)
    }

    fn attribute(self, device: c_int, attribute: DeviceAttribute) -> Result<c_int> {
        let mut value = 0;
        // SAFETY: the function writes a number there; `device` is one of the driver's.
        unsafe { checked!(self, cuDeviceGetAttribute(&raw mut value, attribute, device)) }?;
        Ok(value)
    }

    pub(super) fn current_context(self) -> Result<ContextHandle> {
        let mut context = ContextHandle::NONE;
        // SAFETY: the function writes a handle there.
        unsafe { checked!(self, cuCtxGetCurrent(&raw mut context)) }?;
        Ok(context)
    }

    /// Returns the device of the current context.
    pub(super) fn current_device(self) -> Result<u32> {
        let mut device = 0;
        // SAFETY: the function writes a number there.
        unsafe { checked!(self, cuCtxGetDevice(&raw mut device)) }?;
        Ok(counted(device))
    }

    pub(super) fn push_context(self, context: ContextHandle) -> Result<()> {
        // SAFETY: contexts are handles of the driver, and are retained for the life of the process.
        unsafe { checked!(self, cuCtxPushCurrent_v2(context)) }
    }

    pub(super) fn pop_context(self) -> Result<()> {
        let mut context = ContextHandle::NONE;
        // SAFETY: the function writes a handle there.
        unsafe { checked!(self, cuCtxPopCurrent_v2(&raw mut context)) }
    }

    /// Returns the device memory in bytes: free and total.
    pub(super) fn memory_info(self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the function writes two numbers there.
        unsafe { checked!(self, cuMemGetInfo_v2(&raw mut free, &raw mut total)) }?;
        Ok((free, total))
    }

    /// Allocates device memory, or returns `None` when there is not enough.
    pub(super) fn allocate(self, bytes: usize) -> Result<Option<DevicePtr>> {
        let mut address = DevicePtr::of(ptr::null());
        let unlocked = unlock_interpreter();
        // SAFETY: the function writes an address there.
        let code = unsafe { self.0.cuMemAlloc_v2(&raw mut address, bytes) };
        drop(unlocked);
        if code == Code::OUT_OF_MEMORY {
            return Ok(None);
        }
        self.check("cuMemAlloc_v2", code)?;
        Ok(Some(address))
    }

    /// # Safety
    /// The address came from [`Driver::allocate`], is freed once, and no enqueued work uses its memory.
    pub(super) unsafe fn free(self, address: DevicePtr) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { waiting!(self, cuMemFree_v2(address)) }
    }

    /// Allocates page-locked host memory for every context and kernel, or returns `None` when there is not
    /// enough.
    pub(super) fn allocate_host(self, bytes: usize) -> Result<Option<*mut u8>> {
        let mut address: *mut c_void = ptr::null_mut();
        let unlocked = unlock_interpreter();
        // SAFETY: the function writes an address there.
        let code = unsafe { self.0.cuMemHostAlloc(&raw mut address, bytes, PORTABLE_AND_MAPPED) };
        drop(unlocked);
        if code == Code::OUT_OF_MEMORY {
            return Ok(None);
        }
        self.check("cuMemHostAlloc", code)?;
        Ok(Some(address.cast()))
    }

    /// # Safety
    /// The address came from [`Driver::allocate_host`], is freed once, and no enqueued work uses its memory.
    pub(super) unsafe fn free_host(self, address: *mut u8) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { waiting!(self, cuMemFreeHost(address.cast())) }
    }

    /// Page-locks host memory for every context. Returns `false` if part of it is page-locked already.
    ///
    /// # Safety
    /// `bytes` bytes are mapped at `address` until [`Driver::unregister_host`].
    pub(super) unsafe fn register_host(self, address: *mut u8, bytes: usize) -> Result<bool> {
        let unlocked = unlock_interpreter();
        // SAFETY: guaranteed by the caller.
        let code = unsafe { self.0.cuMemHostRegister_v2(address.cast(), bytes, PORTABLE_AND_MAPPED) };
        drop(unlocked);
        if code == Code::ALREADY_REGISTERED {
            return Ok(false);
        }
        self.check("cuMemHostRegister_v2", code).map_err(|failure| {
            if code != Code::OUT_OF_MEMORY {
                return failure;
            }
            let text = format!("{bytes} bytes of host memory cannot be page-locked in one piece: {failure}");
            Error::new(ErrorKind::OutOfMemory, text).with_asked(bytes).with_code(code.0)
        })?;
        Ok(true)
    }

    /// # Safety
    /// The address was registered by [`Driver::register_host`], is unregistered once, and no enqueued work
    /// uses its memory as page-locked.
    pub(super) unsafe fn unregister_host(self, address: *mut u8) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { waiting!(self, cuMemHostUnregister(address.cast())) }
    }

    /// Returns whether the byte at `address` is device memory or page-locked.
    pub(super) fn knows(self, address: *const u8) -> Result<bool> {
        let mut kind: c_uint = 0;
        // SAFETY: the function writes a number there, and follows no address.
        let code = unsafe {
            self.0.cuPointerGetAttribute(
                (&raw mut kind).cast(),
                PointerAttribute::MEMORY_TYPE,
                DevicePtr::of(address),
            )
        };
        if code == Code::INVALID_VALUE {
            return Ok(false);
        }
        self.check("cuPointerGetAttribute", code).map(|()| true)
    }

    /// Enqueues a copy between any two addresses. With pageable memory it is done, or has read its source, on
    /// return.
    ///
    /// # Safety
    /// `bytes` bytes can be read at `source` and written at `target` until the copy has run.
    pub(super) unsafe fn copy(
        self,
        target: DevicePtr,
        source: DevicePtr,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: guaranteed by the caller; streams are alive, as `Stream` requires.
        unsafe { waiting!(self, cuMemcpyAsync(target, source, bytes, stream.into())) }
    }

    /// Works like [`Driver::copy`], for `height` rows of `width` bytes.
    ///
    /// # Safety
    /// Same as [`Driver::copy`], for each row.
    pub(super) unsafe fn copy_2d(
        self,
        target: Rows,
        source: Rows,
        [height, width]: [usize; 2],
        stream: Stream,
    ) -> Result<()> {
        let side = |rows: Rows| rows.side(DevicePtr::of(rows.address));
        let copy = Copy2d { source: side(source), target: side(target), width, height };
        // SAFETY: guaranteed by the caller, for each row; the function reads `copy` before it returns.
        unsafe { waiting!(self, cuMemcpy2DAsync_v2(&raw const copy, stream.into())) }
    }

    /// # Safety
    /// `bytes` bytes at `address` are device memory until the work has run.
    pub(super) unsafe fn fill(
        self,
        address: DevicePtr,
        value: u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: guaranteed by the caller; streams are alive, as `Stream` requires.
        unsafe { waiting!(self, cuMemsetD8Async(address, value, bytes, stream.into())) }
    }

    /// # Safety
    /// Same as [`Driver::copy`]; the source is host memory.
    pub(super) unsafe fn copy_to_device(
        self,
        target: DevicePtr,
        source: *const u8,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: guaranteed by the caller; streams are alive, as `Stream` requires.
        unsafe { waiting!(self, cuMemcpyHtoDAsync_v2(target, source.cast(), bytes, stream.into())) }
    }

    /// # Safety
    /// Same as [`Driver::copy`]; the target is host memory.
    pub(super) unsafe fn copy_to_host(
        self,
        target: *mut u8,
        source: DevicePtr,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: guaranteed by the caller; streams are alive, as `Stream` requires.
        unsafe { waiting!(self, cuMemcpyDtoHAsync_v2(target.cast(), source, bytes, stream.into())) }
    }

    pub(super) fn synchronize(self, stream: Stream) -> Result<()> {
        // SAFETY: streams are alive, as `Stream` requires.
        unsafe { waiting!(self, cuStreamSynchronize(stream.into())) }
    }

    /// Returns the state of `stream`, a stream of the current context's device.
    pub(super) fn stream_state(self, stream: Stream) -> Result<StreamState> {
        let mut status = CaptureStatus::NONE;
        // SAFETY: the function writes a number there; streams are alive, as `Stream` requires.
        let code = unsafe { self.0.cuStreamIsCapturing(stream.into(), &raw mut status) };
        match code {
            Code::CAPTURE_IMPLICIT => return Ok(StreamState::Captured),
            Code::INVALID_HANDLE => return Ok(StreamState::Destroyed),
            code => self.check("cuStreamIsCapturing", code)?,
        }
        Ok(if status == CaptureStatus::NONE { StreamState::Running } else { StreamState::Captured })
    }

    /// Returns a new stream in the current context, that of device `ordinal`. It does not wait for the default
    /// stream.
    pub(super) fn create_stream(self, ordinal: u32) -> Result<Stream> {
        let mut stream = StreamHandle::NONE;
        // SAFETY: the function writes a handle there.
        unsafe { checked!(self, cuStreamCreate(&raw mut stream, NON_BLOCKING)) }?;
        stream.stream(ordinal)
    }

    pub(super) fn create_event(self, wait: HostWait) -> Result<EventHandle> {
        let mut event = EventHandle::NONE;
        let flags = match wait {
            HostWait::Spins => DISABLE_TIMING,
            HostWait::Sleeps => DISABLE_TIMING | BLOCKING_SYNC,
        };
        // SAFETY: the function writes a handle there.
        unsafe { checked!(self, cuEventCreate(&raw mut event, flags)) }?;
        Ok(event)
    }

    /// Returns `false` when the device of the current context, which is the event's, no longer has such a stream.
    pub(super) fn record_event(self, event: EventHandle, stream: Stream) -> Result<bool> {
        let unlocked = unlock_interpreter();
        // SAFETY: events are never destroyed; streams are alive, as `Stream` requires.
        let code = unsafe { self.0.cuEventRecord(event, stream.into()) };
        drop(unlocked);
        if code == Code::INVALID_HANDLE {
            return Ok(false);
        }
        self.check("cuEventRecord", code).map(|()| true)
    }

    pub(super) fn query_event(self, event: EventHandle) -> Result<bool> {
        // SAFETY: events are never destroyed.
        let code = unsafe { self.0.cuEventQuery(event) };
        if code == Code::NOT_READY {
            return Ok(false);
        }
        self.check("cuEventQuery", code)?;
        Ok(true)
    }

    pub(super) fn wait_for_event(self, event: EventHandle) -> Result<()> {
        // SAFETY: events are never destroyed.
        unsafe { waiting!(self, cuEventSynchronize(event)) }
    }

    /// Makes everything enqueued on `stream` from now on wait for `event`.
    pub(super) fn stream_wait_event(self, stream: Stream, event: EventHandle) -> Result<()> {
        // SAFETY: events are never destroyed; streams are alive, as `Stream` requires.
        unsafe { waiting!(self, cuStreamWaitEvent(stream.into(), event, 0)) }
    }

    /// Loads an image in the current context. Returns the reason when another image of the same kernels may
    /// work.
    ///
    /// # Safety
    /// `image` points to PTX that ends with a zero, or to a whole cubin.
    pub(super) unsafe fn load_module(
        self,
        image: *const u8,
    ) -> Result<std::result::Result<ModuleHandle, Error>> {
        let mut module = ModuleHandle::NONE;
        let unlocked = unlock_interpreter();
        // SAFETY: guaranteed by the caller.
        let code = unsafe { self.0.cuModuleLoadData(&raw mut module, image.cast()) };
        drop(unlocked);
        let loaded = self.check("cuModuleLoadData", code).map(|()| module);
        if Code::UNSUITABLE_IMAGES.contains(&code) { Ok(loaded) } else { loaded.map(Ok) }
    }

    /// # Safety
    /// The module is loaded, and none of its kernels is used any more.
    pub(super) unsafe fn unload_module(self, module: ModuleHandle) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { checked!(self, cuModuleUnload(module)) }
    }

    /// Loads a kernel of a module at once: its first launch may be within a capture, where nothing can be
    /// loaded.
    pub(super) fn function(self, module: ModuleHandle, name: &CStr) -> Result<FunctionHandle> {
        let mut function = FunctionHandle::NONE;
        // SAFETY: the function writes a handle there; the name ends with a zero, and the module is loaded.
        unsafe { checked!(self, cuModuleGetFunction(&raw mut function, module, name.as_ptr())) }?;
        if let Some(load) = self.function_loader() {
            // SAFETY: the function belongs to a loaded module.
            self.check("cuFuncLoad", unsafe { load(function) })?;
        } else {
            // Older drivers load a function for a query that requires it to be loaded.
            let mut threads = 0;
            let attribute = FunctionAttribute::MAX_THREADS_PER_BLOCK;
            // SAFETY: the function writes a number there; the kernel belongs to a loaded module.
            unsafe { checked!(self, cuFuncGetAttribute(&raw mut threads, attribute, function)) }?;
        }
        Ok(function)
    }

    /// Returns `cuFuncLoad`, if the driver has it: it came with CUDA 12.4.
    fn function_loader(self) -> Option<unsafe extern "C" fn(FunctionHandle) -> Code> {
        const SINCE: c_int = 12_040;
        let (mut found, mut status) = (ptr::null_mut(), LookupStatus(0));
        // SAFETY: the name ends with a zero, and the function writes an address and a number there.
        let code = unsafe {
            self.0.cuGetProcAddress_v2(c"cuFuncLoad".as_ptr(), &raw mut found, SINCE, 0, &raw mut status)
        };
        // SAFETY: the driver's function of this name takes a function and returns a code.
        let load = unsafe {
            std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn(FunctionHandle) -> Code>>(found)
        };
        load.filter(|_| code == Code::SUCCESS)
    }

    /// Launches a kernel with one parameter.
    ///
    /// # Safety
    /// `params` points to the kernel's parameter, and every address in it is valid for the kernel's use of
    /// it.
    pub(super) unsafe fn launch(
        self,
        function: FunctionHandle,
        [x, y]: [u32; 2],
        threads: u32,
        params: *const c_void,
        stream: Stream,
    ) -> Result<()> {
        let mut arguments = [params.cast_mut()];
        // SAFETY: guaranteed by the caller; the function copies the parameter before it returns.
        unsafe {
            waiting!(
                self,
                cuLaunchKernel(
                    function,
                    x,
                    y,
                    1,
                    threads,
                    1,
                    1,
                    0,
                    stream.into(),
                    arguments.as_mut_ptr(),
                    ptr::null_mut()
                )
            )
        }
    }
}

/// Returns a count of the driver, which is never negative.
fn counted(number: c_int) -> u32 {
    u32::try_from(number).expect("the driver counts devices and versions from 0")
}

impl Drop for RelaxedThread {
    fn drop(&mut self) {
        // `relax` has set it; a call that fails means that the driver is shutting down.
        // SAFETY: the function reads and writes a mode there.
        let _: Result<()> =
            unsafe { checked!(self.driver, cuThreadExchangeStreamCaptureMode(&raw mut self.previous)) };
    }
}
