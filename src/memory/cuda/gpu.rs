//! An open device.
//!
//! A device is opened once per process and never closed. Every method makes the primary context current for
//! its duration, and may be called on any thread. Work is only enqueued unless a method says that it waits.

use std::ffi::CStr;
use std::sync::{Arc, Mutex, OnceLock};

use crate::base::sync::lock;
use crate::base::{Device, Error, ErrorKind, Result};
use crate::memory::forked::{check_not_forked, watch_for_forks};
use crate::memory::{BorrowedTensor, Image, RegionRange, Stream};

use super::driver::{
    ContextHandle, DevicePtr, Driver, EventHandle, FunctionHandle, RelaxedThread, Rows, StreamState,
};
use super::host_wait::HostWait;
use super::probe;

/// Threads per block, for every kernel.
const BLOCK: u32 = 256;

/// The open devices. They stay open for the life of the process.
static OPEN: Mutex<Vec<Arc<Gpu>>> = Mutex::new(Vec::new());

/// An NVIDIA device, through its primary context.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::ErrorKind;
/// use kvpool::memory::{
///     Backend, Contents, CopyDirection, Cuda, Event, Gpu, HostWait, PageLockedHost, Region, Ring, SideStream,
///     Stream,
/// };
/// # fn main() -> kvpool::base::Result<()> {
/// let gpu = match Gpu::open(0) {
///     Ok(gpu) => gpu,
///     // No driver or no device.
///     Err(error) if error.kind() == ErrorKind::BackendUnavailable => return Ok(()),
///     Err(error) => return Err(error),
/// };
/// let stream = Stream::default_of(gpu.device());
/// let memory: Arc<dyn Backend> = Arc::new(Cuda::new(&gpu, stream));
/// let on_device = Region::with(Arc::clone(&memory), 4096, Contents::ZerosOn(stream), Arc::default())?;
/// let on_host = Region::new(Arc::new(PageLockedHost::new(&gpu)), 4096)?;
/// gpu.copy_in(on_device.range(0, 4096)?, on_host.range(0, 4096)?, stream)?;
/// // A stream of the crate's own comes behind the work of this one.
/// let copies = gpu.side_stream(SideStream::Copy(CopyDirection::Out))?;
/// let filled = Event::record_for(&gpu, stream, HostWait::Sleeps)?;
/// filled.make_stream_wait(copies)?;
/// filled.wait()?;
/// assert!(filled.has_passed()?);
/// // Small arrays on their way to the device.
/// assert!(Ring::new(&gpu, &memory, 4096)?.capacity() >= 4096);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Gpu {
    ordinal: u32,
    capability: (u32, u32),
    driver: Driver,
    context: ContextHandle,
    /// Events not in use, by how threads wait for them.
    free_events: Mutex<[Vec<EventHandle>; 2]>,
    /// The streams of [`Gpu::side_stream`], once they are made.
    side_streams: [OnceLock<Stream>; 4],
    /// Held while one of them is made. Not to ask which there are: every launch does.
    making_side_stream: Mutex<()>,
}

/// Work that runs beside the caller's streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SideStream {
    /// Copies between host memory and the device.
    Copy(CopyDirection),
    /// Work that fills a staging area: kernels that gather what is copied to host memory, and copies of what is
    /// scattered.
    Filling(CopyDirection),
}

/// A direction of copies between host memory and a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// From host memory to the device.
    In,
    /// From the device to host memory.
    Out,
}

/// A loaded kernel, for launches on its device.
#[derive(Clone, Copy, Debug)]
pub struct Function(FunctionHandle);

/// Keeps the device's context current until this guard drops.
pub(super) struct ContextGuard {
    driver: Driver,
    pushed: bool,
    /// Restores the capture mode of the thread on drop.
    relaxed: Option<RelaxedThread>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        drop(self.relaxed.take());
        if self.pushed {
            // `enter` pushed it; a pop that fails means that the driver is shutting down.
            let _ = self.driver.pop_context();
        }
    }
}

impl Gpu {
    /// The most bytes from one row to the next in `Gpu::copy_2d`.
    pub const MAX_PITCH: usize = i32::MAX as usize;

    /// Opens device `ordinal`, or returns it if it is open.
    ///
    /// # Errors
    /// [`ErrorKind::BackendUnavailable`] with the missing part, [`ErrorKind::Driver`] after a fork.
    pub fn open(ordinal: u32) -> Result<Arc<Self>> {
        check_not_forked()?;
        let mut open = lock(&OPEN);
        if let Some(gpu) = open.iter().find(|gpu| gpu.ordinal == ordinal) {
            return Ok(Arc::clone(gpu));
        }
        let driver = probe::probe(ordinal)?;
        watch_for_forks();
        let unusable = |failure: Error| {
            let text = format!("device cuda:{ordinal} cannot be used: {failure}");
            Error::new(ErrorKind::BackendUnavailable, text)
        };
        let context = driver.retain_context(ordinal).map_err(unusable)?;
        let capability = driver.capability(ordinal).map_err(unusable)?;
        let gpu = Arc::new(Self {
            ordinal,
            capability,
            driver,
            context,
            free_events: Mutex::default(),
            side_streams: Default::default(),
            making_side_stream: Mutex::default(),
        });
        open.push(Arc::clone(&gpu));
        Ok(gpu)
    }

    /// Returns a device for page-locking host memory, chosen so that no device is opened for this alone: an
    /// open one, else that of the current context, else one whose primary context is active in this process;
    /// else device 0.
    ///
    /// # Errors
    /// Same as [`Gpu::open`].
    pub fn any() -> Result<Arc<Self>> {
        if let Some(gpu) = lock(&OPEN).first() {
            return Ok(Arc::clone(gpu));
        }
        check_not_forked()?;
        let driver = probe::probe(0)?;
        // If this call fails, `open` fails for the same reason and returns the error.
        let is_active = |ordinal: &u32| driver.has_context(*ordinal).unwrap_or(false);
        let in_use = || (0..driver.device_count().unwrap_or(0)).find(is_active);
        Self::open(driver.current_device().ok().or_else(in_use).unwrap_or(0))
    }

    /// Returns the device.
    #[must_use]
    pub const fn device(&self) -> Device {
        Device::Cuda(self.ordinal)
    }

    /// Returns the compute capability, major and minor.
    #[must_use]
    pub(crate) const fn capability(&self) -> (u32, u32) {
        self.capability
    }

    /// Returns the version of CUDA that the driver offers, major and minor.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when a driver call fails.
    pub(crate) fn driver_version(&self) -> Result<(u32, u32)> {
        self.check_process()?;
        self.driver.version()
    }

    /// Checks that `stream` is one of this device, on which its work can be enqueued.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] with both devices.
    pub(crate) fn check_own(&self, stream: Stream) -> Result<()> {
        if stream.ordinal() == self.ordinal {
            return Ok(());
        }
        let (handle, theirs) = (stream.handle(), Device::Cuda(stream.ordinal()));
        Err(Error::argument(format!(
            "stream {handle:#x} is one of {theirs}; the work is enqueued on {}",
            self.device()
        )))
    }

    /// Returns the device of `stream`, which is opened if it is not this one.
    pub(super) fn of_stream(self: &Arc<Self>, stream: Stream) -> Result<Arc<Self>> {
        if stream.ordinal() == self.ordinal { Ok(Arc::clone(self)) } else { Self::open(stream.ordinal()) }
    }

    /// Returns the driver, for calls in this device's context.
    pub(super) const fn driver(&self) -> Driver {
        self.driver
    }

    /// Checks that this process can still use the device. Makes no driver call.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] in a process that was forked after the device was first used.
    pub fn check_process(&self) -> Result<()> {
        check_not_forked()
    }

    /// Makes the device's context current.
    pub(super) fn enter(&self) -> Result<ContextGuard> {
        check_not_forked()?;
        let driver = self.driver;
        let pushed = driver.current_context()? != self.context;
        if pushed {
            driver.push_context(self.context)?;
        }
        Ok(ContextGuard { driver, pushed, relaxed: None })
    }

    /// Calls `work` while the device's context is current, so that none of its calls need make it so.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when a driver call fails, and the errors of `work`.
    pub(crate) fn in_context<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        let _entered = self.enter()?;
        work()
    }

    /// Makes the context of a stream's device current, which is opened if it is not this one.
    pub(super) fn enter_of(&self, stream: Stream) -> Result<ContextGuard> {
        if stream.ordinal() == self.ordinal { self.enter() } else { Self::open(stream.ordinal())?.enter() }
    }

    /// Works like [`Gpu::enter`], for work on `stream`, which must be a stream of this device.
    fn enter_on(&self, stream: Stream) -> Result<ContextGuard> {
        self.check_own(stream)?;
        self.enter()
    }

    /// Works like [`Gpu::enter`], for calls that are safe during captures of other streams.
    pub(super) fn enter_beside_captures(&self) -> Result<ContextGuard> {
        let mut entered = self.enter()?;
        entered.relaxed = Some(self.driver.relax()?);
        Ok(entered)
    }

    /// Returns the device memory that is free, in bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when a driver call fails.
    pub fn free_bytes(&self) -> Result<usize> {
        let _entered = self.enter_beside_captures()?;
        Ok(self.driver.memory_info()?.0)
    }

    /// Loads the kernels `names` from the first of `images` that suits the device and its driver. They can
    /// then be launched within a capture, and loading them disturbs no capture.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when the driver accepts none of the images, with its reason for the last one, or
    /// when a name is missing.
    pub fn load<const N: usize>(&self, images: &[Image<'_>], names: [&CStr; N]) -> Result<[Function; N]> {
        let _entered = self.enter_beside_captures()?;
        let mut refused = Error::config("no image of the kernels was given");
        for image in images {
            // SAFETY: the image is whole, and its text ends with a zero.
            match unsafe { self.driver.load_module(image.address()) }? {
                Ok(module) => {
                    let functions: Result<Vec<_>> =
                        names.iter().map(|name| self.driver.function(module, name).map(Function)).collect();
                    if functions.is_err() {
                        // SAFETY: it was just loaded, and its kernels are not returned.
                        unsafe { self.driver.unload_module(module) }?;
                    }
                    return functions.map(|all| all.try_into().expect("one for each name"));
                }
                Err(failure) => refused = failure,
            }
        }
        Err(refused)
    }

    /// Enqueues a kernel that takes one parameter by value, in blocks of 256 threads.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when a driver call fails.
    ///
    /// # Safety
    /// `function` was loaded on this device and takes a `P`; every address in `params` is valid for what the
    /// kernel does there, until it has run.
    pub(crate) unsafe fn launch<P>(
        &self,
        function: Function,
        grid: [u32; 2],
        params: &P,
        stream: Stream,
    ) -> Result<()> {
        let _entered = self.enter_on(stream)?;
        let params: *const P = params;
        // SAFETY: guaranteed by the caller.
        unsafe { self.driver.launch(function.0, grid, BLOCK, params.cast(), stream) }
    }

    /// Enqueues a copy from page-locked memory to as many bytes on the device. The source must not change
    /// until the copy has run.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] when the lengths differ, [`ErrorKind::Driver`] when a driver call fails.
    pub fn copy_in(&self, target: RegionRange<'_>, source: RegionRange<'_>, stream: Stream) -> Result<()> {
        let bytes = source.bytes();
        if target.bytes() != bytes {
            return Err(Error::argument(format!("{bytes} bytes do not fill {}", target.bytes())));
        }
        if bytes == 0 {
            return Ok(());
        }
        let (to, from) = (DevicePtr::of(target.address().as_ptr()), source.address().as_ptr());
        let _entered = self.enter_on(stream)?;
        // SAFETY: both ranges lie in live regions; the caller keeps the source unchanged until the copy has
        // run.
        let copied = unsafe { self.driver.copy_to_device(to, from, bytes, stream) };
        target.record_stream(stream);
        source.record_stream(stream);
        copied
    }

    /// Enqueues a copy of a contiguous tensor on this device to as many bytes of host memory. If those are
    /// page-locked, nothing waits, and the bytes are valid when an event recorded afterwards has passed.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] when the tensor has gaps or another length, [`ErrorKind::Driver`] when a driver
    /// call fails.
    pub fn copy_out(
        &self,
        source: &BorrowedTensor<'_>,
        target: RegionRange<'_>,
        stream: Stream,
    ) -> Result<()> {
        let bytes = source.shape().numel() * source.dtype().size();
        if !source.is_contiguous() || bytes != target.bytes() {
            return Err(Error::argument(
                "only a contiguous tensor can be copied as it lies, to as many bytes",
            ));
        }
        if bytes == 0 {
            return Ok(());
        }
        let (to, from) = (target.address(), DevicePtr::of(source.address().as_ptr()));
        self.check_own(stream)?;
        let _entered = self.enter_beside_captures()?;
        // SAFETY: the target lies in a live region, and `BorrowedTensor` guarantees the elements of the
        // source. The memory of both is freed only after the copy, as they record the stream.
        let copied = unsafe { self.driver.copy_to_host(to.as_ptr(), from, bytes, stream) };
        target.record_stream(stream);
        source.record_stream(stream);
        copied
    }

    /// Enqueues a copy of the bytes of a contiguous tensor to another; this device must reach both. If both
    /// are on a device or page-locked, nothing waits, and the copy is done when an event recorded afterwards
    /// has passed.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] when they are not contiguous or differ in length, [`ErrorKind::Driver`] when a
    /// driver call fails.
    pub(crate) fn copy(
        &self,
        target: &BorrowedTensor<'_>,
        source: &BorrowedTensor<'_>,
        stream: Stream,
    ) -> Result<()> {
        let bytes = |tensor: &BorrowedTensor<'_>| tensor.shape().numel() * tensor.dtype().size();
        if !(target.is_contiguous() && source.is_contiguous() && bytes(target) == bytes(source)) {
            return Err(Error::argument(
                "only contiguous tensors with the same number of bytes can be copied",
            ));
        }
        if bytes(source) == 0 {
            return Ok(());
        }
        self.check_own(stream)?;
        let _entered = self.enter_beside_captures()?;
        let at = |tensor: &BorrowedTensor<'_>| DevicePtr::of(tensor.address().as_ptr());
        // SAFETY: `BorrowedTensor` guarantees the elements of both.
        unsafe { self.driver.copy(at(target), at(source), bytes(source), stream) }
    }

    /// Works like [`Gpu::copy`], for rows of bytes with a stride: both tensors are `[rows, bytes]`, with
    /// contiguous rows at most [`Gpu::MAX_PITCH`] bytes apart.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for other tensors, [`ErrorKind::Driver`] when a driver call fails.
    pub(crate) fn copy_2d(
        &self,
        target: &BorrowedTensor<'_>,
        source: &BorrowedTensor<'_>,
        stream: Stream,
    ) -> Result<()> {
        let (to, from) = (rows(target)?, rows(source)?);
        if to.1 != from.1 {
            return Err(Error::argument("only as many rows of as many bytes can be copied"));
        }
        if to.1.contains(&0) {
            return Ok(());
        }
        self.check_own(stream)?;
        let _entered = self.enter_beside_captures()?;
        // SAFETY: `BorrowedTensor` guarantees the elements of both.
        unsafe { self.driver.copy_2d(to.0, from.0, to.1, stream) }
    }

    /// Fills bytes of a region on this device with `value`, in the order of `stream`.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when a driver call fails.
    pub fn fill(&self, target: RegionRange<'_>, value: u8, stream: Stream) -> Result<()> {
        if target.bytes() == 0 {
            return Ok(());
        }
        let _entered = self.enter_on(stream)?;
        let address = DevicePtr::of(target.address().as_ptr());
        // SAFETY: the bytes lie in a live region of this device.
        let filled = unsafe { self.driver.fill(address, value, target.bytes(), stream) };
        target.record_stream(stream);
        filled
    }

    /// Waits for everything on `stream`.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] while `stream` is being captured, and for an earlier failure on the device.
    pub fn synchronize(&self, stream: Stream) -> Result<()> {
        self.check_own(stream)?;
        self.check_not_capturing(stream, "a wait for the device")?;
        let _entered = self.enter_beside_captures()?;
        self.driver.synchronize(stream)
    }

    /// Returns whether `stream` is being captured into a graph. A side stream never is: only kvpool has it, and it is
    /// ordered after no stream that is.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when a driver call fails.
    pub(crate) fn is_capturing(&self, stream: Stream) -> Result<bool> {
        self.check_process()?;
        if self.side_streams.iter().any(|side| side.get() == Some(&stream)) {
            return Ok(false);
        }
        Ok(self.stream_state(stream)? == StreamState::Captured)
    }

    /// Returns the state of `stream`, on whatever device.
    pub(super) fn stream_state(&self, stream: Stream) -> Result<StreamState> {
        let _entered = self.enter_of(stream)?;
        self.driver.stream_state(stream)
    }

    /// Checks that `stream` is not being captured into a graph. A graph would repeat a copy from reused
    /// memory with other bytes, and nothing can wait within it.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] if it is; the message begins with `what`, the operation that cannot be captured.
    pub(crate) fn check_not_capturing(&self, stream: Stream, what: &str) -> Result<()> {
        if self.is_capturing(stream)? {
            let text = format!("{what} cannot be captured into a CUDA graph");
            return Err(Error::new(ErrorKind::Driver, text));
        }
        Ok(())
    }

    /// Checks that `stream` can be ordered after each of `others`: impossible while one of them is being
    /// captured.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] if one of them is.
    pub(crate) fn check_can_order(&self, others: &[Stream], stream: Stream) -> Result<()> {
        let mut others = others.iter().filter(|other| **other != stream).peekable();
        if others.peek().is_none() {
            return Ok(());
        }
        self.check_not_capturing(stream, "a wait for work outside of the capture")?;
        others.try_for_each(|&other| {
            self.check_not_capturing(other, "work of another stream, for which this call has to wait,")
        })
    }

    /// Returns the stream for this work: made by the first call, and kept for the life of the
    /// process. It does not wait for the default stream. Other streams may be in a capture meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when a driver call fails; the next call tries again.
    pub fn side_stream(&self, work: SideStream) -> Result<Stream> {
        self.check_process()?;
        let place = &self.side_streams[match work {
            SideStream::Copy(CopyDirection::In) => 0,
            SideStream::Copy(CopyDirection::Out) => 1,
            SideStream::Filling(CopyDirection::In) => 2,
            SideStream::Filling(CopyDirection::Out) => 3,
        }];
        let _making = lock(&self.making_side_stream);
        if let Some(&stream) = place.get() {
            return Ok(stream);
        }
        let _entered = self.enter_beside_captures()?;
        let stream = self.driver.create_stream(self.ordinal)?;
        Ok(*place.get_or_init(|| stream))
    }

    /// Returns whether kernels reach all page-locked host memory at its host address: memory that was
    /// page-locked in place included.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when a driver call fails.
    pub(crate) fn uses_host_pointers(&self) -> Result<bool> {
        self.check_process()?;
        self.driver.uses_host_pointers(self.ordinal)
    }

    /// Takes or creates an event in the current context.
    pub(super) fn take_event(&self, wait: HostWait) -> Result<EventHandle> {
        let free = lock(&self.free_events)[wait as usize].pop();
        free.map_or_else(|| self.driver.create_event(wait), Ok)
    }

    pub(super) fn give_back_event(&self, event: EventHandle, wait: HostWait) {
        lock(&self.free_events)[wait as usize].push(event);
    }
}

/// Returns a tensor of rows of bytes, with the number of rows and the bytes of each.
fn rows(tensor: &BorrowedTensor<'_>) -> Result<(Rows, [usize; 2])> {
    let extent = |extent: i64| usize::try_from(extent).ok();
    let found = match (tensor.shape().as_slice(), tensor.strides().as_slice()) {
        (&[rows, bytes], &[pitch, 1]) if tensor.dtype().size() == 1 => {
            extent(rows).zip(extent(bytes)).zip(extent(pitch))
        }
        _ => None,
    };
    let ((rows, bytes), pitch) =
        found.ok_or_else(|| Error::argument("only rows of bytes can be copied as they lie"))?;
    let is_on_host = tensor.device() == Device::Cpu;
    Ok((Rows { address: tensor.address().as_ptr(), pitch, is_on_host }, [rows, bytes]))
}
