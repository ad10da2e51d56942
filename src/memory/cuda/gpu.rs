//! A device that is in use.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Once};

use crate::base::sync::lock;
use crate::base::{Device, Error, ErrorKind, Result};
use crate::memory::{Borrowed, Image, RegionRange, Stream};

use super::driver::{
    ContextHandle, DevicePtr, Driver, EventHandle, FunctionHandle, Relaxed as RelaxedThread, Rows, StreamMode,
};
use super::{Event, probe};

/// Threads of a block of every kernel.
const BLOCK: u32 = 256;

/// The devices in use, which stay so for the life of the process.
static OPEN: Mutex<Vec<Arc<Gpu>>> = Mutex::new(Vec::new());

/// Whether this process is the child of one that used a device.
static FORKED: AtomicBool = AtomicBool::new(false);

/// An NVIDIA device, through its primary context.
#[derive(Debug)]
pub struct Gpu {
    ordinal: u32,
    capability: (u32, u32),
    driver: Driver,
    context: ContextHandle,
    /// Events that nobody uses now.
    events: Mutex<Vec<EventHandle>>,
}

/// A kernel that was loaded, for launches on the device that it was loaded for.
#[derive(Clone, Copy, Debug)]
pub struct Function(FunctionHandle);

/// The device's context is current until this drops.
pub(super) struct Entered {
    driver: Driver,
    pushed: bool,
    /// Ends when this drops.
    relaxed: Option<RelaxedThread>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        drop(self.relaxed.take());
        if self.pushed {
            // It was pushed by us; if it cannot be popped, the driver is going away.
            let _ = self.driver.pop_context();
        }
    }
}

impl Gpu {
    /// Device `ordinal`, in use from now on.
    ///
    /// # Errors
    /// [`ErrorKind::BackendUnavailable`] that names what is missing, [`ErrorKind::Driver`] after a fork.
    pub fn open(ordinal: u32) -> Result<Arc<Self>> {
        not_forked()?;
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
        let gpu = Arc::new(Self { ordinal, capability, driver, context, events: Mutex::default() });
        open.push(Arc::clone(&gpu));
        Ok(gpu)
    }

    /// A device through which host memory can be page-locked for all, so that none is opened for this alone: one that is
    /// in use, by us, by whoever made the current context, or by anybody in this process; else the first.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub fn any() -> Result<Arc<Self>> {
        if let Some(gpu) = lock(&OPEN).first() {
            return Ok(Arc::clone(gpu));
        }
        not_forked()?;
        let driver = probe::probe(0)?;
        let is_active = |ordinal: &u32| driver.has_context(*ordinal).unwrap_or(false);
        let in_use = || (0..driver.device_count().unwrap_or(0)).find(is_active);
        Self::open(driver.current_device().ok().or_else(in_use).unwrap_or(0))
    }

    /// The device.
    #[must_use]
    pub const fn device(&self) -> Device {
        Device::Cuda(self.ordinal)
    }

    /// Its compute capability, major and minor.
    #[must_use]
    pub const fn capability(&self) -> (u32, u32) {
        self.capability
    }

    /// The driver, for calls in this device's context.
    pub(super) const fn driver(&self) -> Driver {
        self.driver
    }

    /// Checks that it can still be used by this process. Makes no driver call.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] in a process that was forked off after the device was first used.
    pub fn check_process(&self) -> Result<()> {
        not_forked()
    }

    /// Makes its context current.
    pub(super) fn enter(&self) -> Result<Entered> {
        not_forked()?;
        let driver = self.driver;
        let pushed = driver.current_context()? != self.context;
        if pushed {
            driver.push_context(self.context)?;
        }
        Ok(Entered { driver, pushed, relaxed: None })
    }

    /// As [`Gpu::enter`], for calls that other captures do not concern.
    pub(super) fn enter_beside_captures(&self) -> Result<Entered> {
        let mut entered = self.enter()?;
        entered.relaxed = Some(self.driver.relax()?);
        Ok(entered)
    }

    /// Device memory that is free, in bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when the driver refuses.
    pub fn free_bytes(&self) -> Result<usize> {
        let _entered = self.enter_beside_captures()?;
        Ok(self.driver.memory_info()?.0)
    }

    /// Loads the kernels `names` from the first of `images` that suits the device and its driver. They are ready for
    /// launches within a capture then, and nobody's capture minds that they are loaded.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when the driver takes none of the images, with what it says of the last, or lacks a name.
    pub fn load(&self, images: &[Image<'_>], names: &[&CStr]) -> Result<Vec<Function>> {
        let _entered = self.enter_beside_captures()?;
        let mut refused = Error::config("no image of the kernels was given");
        for image in images {
            // SAFETY: the image is whole, and its text ends with a zero.
            match unsafe { self.driver.load_module(image.address()) }? {
                Ok(module) => {
                    let functions: Result<Vec<_>> =
                        names.iter().map(|name| self.driver.function(module, name).map(Function)).collect();
                    if functions.is_err() {
                        self.driver.unload_module(module)?;
                    }
                    return functions;
                }
                Err(failure) => refused = failure,
            }
        }
        Err(refused)
    }

    /// Enqueues a kernel that takes one parameter by value, in blocks of 256 threads.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when the driver refuses.
    ///
    /// # Safety
    /// `function` was loaded on this device and takes a `P`; every address in `params` is valid for what the kernel
    /// does there, until it has run.
    pub unsafe fn launch<P>(
        &self,
        function: Function,
        grid: [u32; 2],
        params: &P,
        stream: Stream,
    ) -> Result<()> {
        let _entered = self.enter()?;
        let params: *const P = params;
        // SAFETY: the caller promises it.
        unsafe { self.driver.launch(function.0, grid, BLOCK, params.cast(), stream) }
    }

    /// Enqueues a copy from page-locked memory to as many bytes on the device. Nobody may change the source until
    /// the copy has run.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when one range is longer, [`ErrorKind::Driver`] when the driver refuses.
    pub fn copy_in(&self, target: RegionRange<'_>, source: RegionRange<'_>, stream: Stream) -> Result<()> {
        let bytes = source.bytes();
        if target.bytes() != bytes {
            return Err(Error::config(format!("{bytes} bytes do not fill {}", target.bytes())));
        }
        if bytes == 0 {
            return Ok(());
        }
        target.used_on(stream);
        source.used_on(stream);
        let (target, source) = (DevicePtr::of(target.address().as_ptr()), source.address().as_ptr());
        let _entered = self.enter()?;
        // SAFETY: both ranges lie in live regions; that the source stays until then is the caller's business.
        unsafe { self.driver.copy_to_device(target, source, bytes, stream) }
    }

    /// Enqueues a copy of a contiguous tensor on this device to as many bytes of host memory. If that is
    /// page-locked, nothing waits, and the bytes are there when an event recorded afterwards has passed.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when the tensor has gaps or is not as long, [`ErrorKind::Driver`] when the driver refuses.
    pub fn copy_out(&self, source: &Borrowed<'_>, target: RegionRange<'_>, stream: Stream) -> Result<()> {
        let bytes = source.shape().numel() * source.dtype().size();
        if !source.is_contiguous() || bytes != target.bytes() {
            return Err(Error::config("only a contiguous tensor can be copied as it lies, to as many bytes"));
        }
        if bytes == 0 {
            return Ok(());
        }
        target.used_on(stream);
        let target = target.address();
        let source = DevicePtr::of(source.address().as_ptr());
        let _entered = self.enter_beside_captures()?;
        // SAFETY: the target lies in a live region, and `Borrowed` promises the elements of the source.
        unsafe { self.driver.copy_to_host(target.as_ptr(), source, bytes, stream) }
    }

    /// Enqueues a copy of the bytes of a contiguous tensor to another, of which this device can reach both. If both are
    /// on a device or page-locked, nothing waits, and the copy is done when an event recorded afterwards has passed.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when they are not contiguous or not as long, [`ErrorKind::Driver`] when the driver refuses.
    pub fn copy(&self, target: &Borrowed<'_>, source: &Borrowed<'_>, stream: Stream) -> Result<()> {
        let bytes = |tensor: &Borrowed<'_>| tensor.shape().numel() * tensor.dtype().size();
        if !(target.is_contiguous() && source.is_contiguous() && bytes(target) == bytes(source)) {
            return Err(Error::config("only contiguous tensors of the same bytes can be copied as they lie"));
        }
        if bytes(source) == 0 {
            return Ok(());
        }
        let _entered = self.enter()?;
        let at = |tensor: &Borrowed<'_>| DevicePtr::of(tensor.address().as_ptr());
        // SAFETY: `Borrowed` promises the elements of both.
        unsafe { self.driver.copy(at(target), at(source), bytes(source), stream) }
    }

    /// As [`Gpu::copy`], for rows of bytes that lie apart: both tensors are `[rows, bytes]`, and the bytes of a row one after
    /// the other. At most 2 GiB lie from a row to the next.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when they are not such tensors, [`ErrorKind::Driver`] when the driver refuses.
    pub fn copy_2d(&self, target: &Borrowed<'_>, source: &Borrowed<'_>, stream: Stream) -> Result<()> {
        let (to, from) = (rows(target)?, rows(source)?);
        if to.1 != from.1 {
            return Err(Error::config("only as many rows of as many bytes can be copied"));
        }
        if to.1.contains(&0) {
            return Ok(());
        }
        let _entered = self.enter()?;
        // SAFETY: `Borrowed` promises the elements of both.
        unsafe { self.driver.copy_2d(to.0, from.0, to.1, stream) }
    }

    /// Fills bytes of a region on this device with `value`, in the order of `stream`.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when the driver refuses.
    pub fn fill(&self, target: RegionRange<'_>, value: u8, stream: Stream) -> Result<()> {
        if target.bytes() == 0 {
            return Ok(());
        }
        target.used_on(stream);
        let _entered = self.enter()?;
        let address = DevicePtr::of(target.address().as_ptr());
        // SAFETY: the bytes lie in a live region of this device.
        unsafe { self.driver.fill(address, value, target.bytes(), stream) }
    }

    /// Waits for everything on `stream`.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] while `stream` is captured; also for what failed on the device before.
    pub fn synchronize(&self, stream: Stream) -> Result<()> {
        self.not_capturing(stream, "a wait for the device")?;
        let _entered = self.enter_beside_captures()?;
        self.driver.synchronize(stream)
    }

    /// Whether somebody captures `stream` into a graph.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when the driver refuses.
    pub fn is_capturing(&self, stream: Stream) -> Result<bool> {
        Ok(self.mode(stream)? == StreamMode::Captured)
    }

    /// What becomes of work on `stream`.
    pub(super) fn mode(&self, stream: Stream) -> Result<StreamMode> {
        let _entered = self.enter()?;
        self.driver.mode(stream)
    }

    /// Checks that `stream` is not being captured into a graph, where a copy from memory that is reused would be
    /// repeated with other bytes, and where nothing can be waited for.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] if it is, naming `what` cannot be done.
    pub fn not_capturing(&self, stream: Stream, what: &str) -> Result<()> {
        if self.is_capturing(stream)? {
            let text = format!("{what} cannot be captured into a CUDA graph");
            return Err(Error::new(ErrorKind::Driver, text));
        }
        Ok(())
    }

    /// Checks that `stream` can come after each of `others`, which nothing can while one of them is captured.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] if one is.
    pub fn can_order(&self, others: &[Stream], stream: Stream) -> Result<()> {
        let mut others = others.iter().filter(|other| **other != stream).peekable();
        if others.peek().is_none() {
            return Ok(());
        }
        self.not_capturing(stream, "a wait for work outside of the capture")?;
        others.try_for_each(|&other| {
            self.not_capturing(
                other,
                "work of another stream, which must be done first, is being recorded, and",
            )
        })
    }

    /// Lets what is enqueued on `stream` from now on come after what each of `others` has now. The host does not wait.
    ///
    /// # Errors
    /// As [`Gpu::can_order`], before anything is enqueued; [`ErrorKind::Driver`] when the driver refuses.
    pub fn order(self: &Arc<Self>, others: &[Stream], stream: Stream) -> Result<()> {
        self.can_order(others, stream)?;
        let mut others = others.iter().filter(|other| **other != stream);
        others.try_for_each(|&other| match Event::record_if_there(self, other)? {
            Some(event) => event.precede(stream),
            None => Ok(()),
        })
    }

    /// An event, in the current context.
    pub(super) fn take_event(&self) -> Result<EventHandle> {
        let kept = lock(&self.events).pop();
        kept.map_or_else(|| self.driver.create_event(), Ok)
    }

    pub(super) fn keep_event(&self, event: EventHandle) {
        lock(&self.events).push(event);
    }
}

/// A tensor of rows of bytes, and how many rows of how many bytes they are.
fn rows(tensor: &Borrowed<'_>) -> Result<(Rows, [usize; 2])> {
    let extent = |extent: i64| usize::try_from(extent).ok();
    let found = match (tensor.shape().as_slice(), tensor.strides().as_slice()) {
        (&[rows, bytes], &[pitch, 1]) if tensor.dtype().size() == 1 => {
            extent(rows).zip(extent(bytes)).zip(extent(pitch))
        }
        _ => None,
    };
    let ((rows, bytes), pitch) =
        found.ok_or_else(|| Error::config("only rows of bytes can be copied as they lie"))?;
    let is_on_host = tensor.device() == Device::Cpu;
    Ok((Rows { address: tensor.address().as_ptr(), pitch, is_on_host }, [rows, bytes]))
}

/// Whether a driver call would come from the child of a process that used the driver.
pub(in crate::memory) fn is_forked() -> bool {
    FORKED.load(Relaxed)
}

fn not_forked() -> Result<()> {
    if is_forked() {
        return Err(Error::new(
            ErrorKind::Driver,
            "this process was forked from one that used CUDA, whose memory it does not have; \
             start worker processes with 'spawn' or 'forkserver'",
        ));
    }
    Ok(())
}

/// Notes forks from now on.
fn watch_for_forks() {
    extern "C" fn in_child() {
        FORKED.store(true, Relaxed);
    }
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler only stores to an atomic, which is allowed in the child of a fork.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}
