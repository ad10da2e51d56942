//! The operations that the driver and the CUDA runtime share, on a current device.

use std::sync::Arc;

use crate::capture::Status;
use crate::codes::{
    BLOCKED, CAPTURE_IMPLICIT, CAPTURE_UNSUPPORTED, CAPTURED_EVENT, Code, DEINITIALIZED, INVALID_CONTEXT,
    INVALID_HANDLE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED, Outcome,
};
use crate::events::Recorded;
use crate::kernels::BLOCK;
use crate::ledger::{LAUNCH, WAIT};
use crate::modules::most_params;
use crate::state::{State, StreamHandles, is_down};
use crate::streams::Position;
use crate::threads::Mode;
use crate::work::{Executor, Work};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// A launch as it is asked for.
pub struct Launch {
    pub function: usize,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub params: *const *const u8,
}

/// Fails if the driver goes down.
pub fn check_up() -> Outcome {
    check(!is_down(), DEINITIALIZED)
}

pub fn check(condition: bool, code: Code) -> Outcome {
    if condition { Ok(()) } else { Err(code) }
}

impl State {
    /// Runs what lies before a place.
    pub fn run(&mut self, until: Position) {
        let mut executor = Executor::new(&self.memory);
        self.streams.run(until, &mut executor);
        drop(executor);
        self.streams.sweep();
    }

    /// Runs what lies before a place; it is reached afterwards.
    pub fn wait_for(&mut self, until: Position) -> Outcome {
        self.run(until);
        check(self.streams.is_reached(until), BLOCKED)
    }

    /// Lets a stream have room for one more item of work.
    pub fn make_room(&mut self, id: usize) -> Outcome {
        if let Some(most) = self.config.most_queued
            && self.streams.pending(Some(id)) >= most
        {
            self.wait_for(self.streams.end(id))?;
        }
        Ok(())
    }

    /// Runs all that is enqueued, on one device or on all.
    pub fn run_all(&mut self, device: Option<usize>) {
        let mut executor = Executor::new(&self.memory);
        for end in self.streams.ends(device) {
            self.streams.run(end, &mut executor);
        }
        drop(executor);
        self.streams.sweep();
    }

    pub fn allocate(&mut self, device: usize, len: usize) -> Outcome<usize> {
        self.streams.captures.forbid()?;
        self.memory.allocate(device, len)
    }

    /// Gives device memory back, after everything has run if it `waits` or a test wants all frees to.
    pub fn free(&mut self, start: usize, waits: bool) -> Outcome {
        self.before_free(waits)?;
        self.memory.free(start)
    }

    pub fn allocate_locked(&mut self, len: usize) -> Outcome<usize> {
        self.streams.captures.forbid()?;
        self.memory.allocate_locked(len)
    }

    pub fn free_locked(&mut self, start: usize) -> Outcome {
        self.before_free(false)?;
        self.memory.free_locked(start)
    }

    pub fn register(&mut self, start: usize, len: usize) -> Outcome {
        self.streams.captures.forbid()?;
        self.memory.register(start, len)
    }

    pub fn unregister(&mut self, start: usize) -> Outcome {
        self.before_free(false)?;
        self.memory.unregister(start)
    }

    fn before_free(&mut self, waits: bool) -> Outcome {
        self.streams.captures.forbid()?;
        if waits || self.config.frees_wait { self.wait_for_all(None) } else { Ok(()) }
    }

    pub fn synchronize(&mut self, device: usize) -> Outcome {
        self.streams.forbid_on(device)?;
        self.streams.captures.forbid()?;
        self.wait_for_all(Some(device))
    }

    /// Runs all that is enqueued; nothing is left afterwards.
    fn wait_for_all(&mut self, device: Option<usize>) -> Outcome {
        self.run_all(device);
        let ends = self.streams.ends(device);
        check(ends.into_iter().all(|end| self.streams.is_reached(end)), BLOCKED)
    }

    pub fn create_stream(&mut self, device: usize, flags: u32) -> Outcome<usize> {
        check(flags <= NON_BLOCKING, INVALID_VALUE)?;
        let used = match self.config.stream_handles {
            StreamHandles::New => None,
            StreamHandles::Reused => self.streams.used_handle(),
        };
        let handle = used.unwrap_or_else(|| self.handle());
        self.streams.create(handle, device, flags != NON_BLOCKING);
        Ok(handle)
    }

    pub fn destroy_stream(&mut self, device: usize, stream: usize) -> Outcome {
        let id = self.streams.resolve(stream, device)?;
        self.streams.destroy(id)
    }

    /// The stream, if it is not captured.
    pub fn uncaptured(&mut self, device: usize, stream: usize) -> Outcome<usize> {
        let id = self.streams.resolve(stream, device)?;
        if let Some(capture) = self.streams.capture_of(id) {
            self.streams.captures.invalidate(capture);
            return Err(CAPTURE_UNSUPPORTED);
        }
        self.streams.check_default(id)?;
        Ok(id)
    }

    pub fn synchronize_stream(&mut self, device: usize, stream: usize) -> Outcome {
        let id = self.uncaptured(device, stream)?;
        self.wait_for(self.streams.end(id))
    }

    /// Fails with [`NOT_READY`] until a stream is done; asked often enough, it runs.
    pub fn query_stream(&mut self, device: usize, stream: usize) -> Outcome {
        let id = self.uncaptured(device, stream)?;
        let end = self.streams.end(id);
        if self.streams.is_reached(end) {
            return Ok(());
        }
        let asked = self.streams.asked(id);
        self.wait_if_patient(end, asked)
    }

    pub fn capture_status(&mut self, device: usize, stream: usize) -> Outcome<Status> {
        let id = self.streams.resolve(stream, device)?;
        // It is asked only, so nothing is spoilt.
        check(self.streams.tied(id).is_none(), CAPTURE_IMPLICIT)?;
        Ok(self.streams.captures.status(self.streams.capture_of(id)))
    }

    fn wait_if_patient(&mut self, until: Position, asked: u64) -> Outcome {
        check(self.config.patience > 0 && asked >= self.config.patience, NOT_READY)?;
        self.run(until);
        check(self.streams.is_reached(until), NOT_READY)
    }

    pub fn create_event(&mut self, device: usize, is_blocking: bool) -> usize {
        let handle = self.handle();
        self.events.create(handle, device, is_blocking);
        handle
    }

    pub fn record_event(&mut self, device: usize, event: usize, stream: usize) -> Outcome {
        let id = self.streams.resolve(stream, device)?;
        check(self.events.get(event)?.device == device, INVALID_HANDLE)?;
        let recorded = if let Some(capture) = self.streams.capture_of(id) {
            Recorded::In(self.streams.captures.mark(capture, id)?)
        } else {
            Recorded::At(self.streams.mark(id)?)
        };
        let event = self.events.get(event)?;
        event.recorded = recorded;
        event.queries = 0;
        Ok(())
    }

    /// The place that an event names, if it names one; not within a capture, nor while anybody captures.
    fn place_of_event(&mut self, event: usize) -> Outcome<Option<Position>> {
        let recorded = self.events.get(event)?.recorded.clone();
        if let Recorded::In(place) = recorded {
            // No mode allows it.
            self.streams.captures.invalidate(place.capture);
            return Err(CAPTURED_EVENT);
        }
        self.streams.captures.forbid()?;
        if let Recorded::At(position) = recorded { Ok(Some(position)) } else { Ok(None) }
    }

    /// Fails with [`NOT_READY`] until what lies before an event has run; asked often enough, it runs.
    pub fn query_event(&mut self, event: usize) -> Outcome {
        let Some(position) = self.place_of_event(event)? else { return Ok(()) };
        if self.streams.is_reached(position) {
            return Ok(());
        }
        let event = self.events.get(event)?;
        event.queries += 1;
        let asked = event.queries;
        self.wait_if_patient(position, asked)
    }

    /// Whether what lies before an event has run already.
    pub fn is_over(&mut self, event: usize) -> Outcome<bool> {
        match self.events.get(event)?.recorded {
            Recorded::Nothing => Err(INVALID_HANDLE),
            Recorded::At(position) => Ok(self.streams.is_reached(position)),
            Recorded::In(_) => Err(CAPTURED_EVENT),
        }
    }

    pub fn synchronize_event(&mut self, event: usize) -> Outcome {
        match self.place_of_event(event)? {
            Some(position) => self.wait_for(position),
            None => Ok(()),
        }
    }

    /// Counts a wait for an event by what the thread does meanwhile.
    pub fn count_wait(&mut self, event: usize) -> Outcome {
        let how = if self.events.get(event)?.is_blocking { "sleeps" } else { "spins" };
        self.ledger.count(&format!("{WAIT}{how}"));
        Ok(())
    }

    /// Lets later work of a stream come after an event as it is recorded now.
    pub fn wait_for_event(&mut self, device: usize, stream: usize, event: usize) -> Outcome {
        let id = self.streams.resolve(stream, device)?;
        match self.events.get(event)?.recorded.clone() {
            Recorded::Nothing => Ok(()),
            Recorded::At(position) => self.streams.order(id, position),
            Recorded::In(place) if self.streams.captures.is_active(place.capture) => {
                self.streams.join_capture(id, &place)
            }
            Recorded::In(_) => Err(CAPTURED_EVENT),
        }
    }

    /// Loads a function, if it is not loaded yet: that may wait for a whole device.
    pub fn load_function(&mut self, function: usize) -> Outcome {
        if !self.modules.get(function)?.is_loaded {
            self.streams.captures.forbid()?;
            self.modules.set_loaded(function);
        }
        Ok(())
    }

    pub fn begin_capture(&mut self, device: usize, stream: usize, mode: i32) -> Outcome {
        let mode = Mode::new(mode).ok_or(INVALID_VALUE)?;
        let id = self.streams.resolve(stream, device)?;
        self.streams.begin_capture(id, mode)
    }

    pub fn end_capture(&mut self, device: usize, stream: usize) -> Outcome<usize> {
        let id = self.streams.resolve(stream, device)?;
        self.streams.end_capture(id)
    }

    /// The answer of `cudaStreamGetCaptureInfo`: the state, and the number of an active capture.
    pub fn capture_info(&mut self, device: usize, stream: usize) -> Outcome<(Status, usize)> {
        let status = self.capture_status(device, stream)?;
        let id = self.streams.resolve(stream, device)?;
        Ok((status, self.streams.capture_of(id).unwrap_or(0)))
    }

    /// Lets every call of a device's context fail from now on.
    pub fn break_device(&mut self, device: usize, code: Code) {
        self.broken.insert(device, code);
    }

    /// Fails if the driver goes down, or a device's context is broken.
    pub fn check_device(&self, device: usize) -> Outcome {
        check_up()?;
        self.broken.get(&device).map_or(Ok(()), |code| Err(*code))
    }

    pub fn launch(&mut self, device: usize, launch: &Launch, stream: usize) -> Outcome {
        let function = self.modules.get(launch.function)?;
        check(function.device == device, INVALID_CONTEXT)?;
        let id = self.streams.resolve(stream, device)?;
        let [x, y, z] = launch.grid;
        let is_grid = x > 0 && x <= i32::MAX.cast_unsigned() && y > 0 && y <= 65_535 && z == 1;
        check(is_grid && launch.block == [BLOCK, 1, 1] && launch.shared_bytes == 0, INVALID_VALUE)?;
        let bytes = function.kernel.params_bytes();
        check(bytes <= most_params(self.config.version), NOT_SUPPORTED)?;
        check(!launch.params.is_null(), INVALID_VALUE)?;
        // SAFETY: a kernel of one parameter is launched with an array of one pointer to it.
        let source = unsafe { launch.params.read() };
        check(!source.is_null(), INVALID_VALUE)?;
        let mut params = vec![0u128; bytes.div_ceil(size_of::<u128>())];
        // SAFETY: the parameter is as long as the kernel says, and there is room for it.
        unsafe { params.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(source, bytes) };
        let params: Arc<[u128]> = params.into();
        if !function.is_loaded {
            self.uncaptured(device, stream)?;
            self.load_function(launch.function)?;
        }
        self.make_room(id)?;
        self.ledger.count(&format!("{LAUNCH}{}", function.kernel.name()));
        self.streams.push(id, Work::Launch { kernel: function.kernel, params, grid: [x, y] })
    }
}
