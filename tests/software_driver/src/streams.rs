//! Queues of work that run late.
//!
//! Work of one stream runs in its order. Running a stream runs what it waits for in others up to the event, and
//! nothing else of them. An event lies behind a numbered item of a stream, so waiting for it later means the record
//! of that time, whatever the event is used for afterwards.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::capture::{Captures, Place};
use crate::codes::{CAPTURE_IMPLICIT, CAPTURE_ISOLATION, CAPTURE_UNSUPPORTED, INVALID_HANDLE, Outcome};
use crate::threads::{self, Mode};
use crate::work::{Executor, Work};

/// Handles from here on are those of streams that were created; below are the default streams: the legacy ones, which
/// have the numbers of their devices, and from [`FIRST_OF_THREADS`] on those of threads.
pub const FIRST_HANDLE: usize = 0x5000_0000;
const FIRST_OF_THREADS: usize = 0x1000;
/// `CU_STREAM_PER_THREAD`. Both 0 and `CU_STREAM_LEGACY`, which is 1, mean the legacy stream.
const PER_THREAD: usize = 2;

/// An entry that a stream comes to.
enum Item {
    Work(Work),
    /// A place that an event names.
    Mark,
    /// Work of the host, over when a test says so.
    Gate,
    /// Comes after an item of another stream.
    Wait {
        stream: usize,
        number: u64,
    },
}

/// A place in a stream.
#[derive(Clone, Copy)]
pub struct Position {
    stream: usize,
    number: u64,
}

struct Stream {
    device: usize,
    /// Created without the flag that frees it of the default stream.
    is_blocking: bool,
    /// Whether its handle may be used.
    is_alive: bool,
    queue: VecDeque<(u64, Item)>,
    /// The number of the last item that was enqueued, and of the last that ran.
    enqueued: u64,
    ran: u64,
    /// The number of times that it was asked whether it is done since it last got work.
    queries: u64,
    /// The capture that records what is enqueued.
    capture: Option<usize>,
}

#[derive(Default)]
pub struct Streams {
    all: BTreeMap<usize, Stream>,
    /// The default streams of threads, by thread and device.
    of_threads: BTreeMap<(usize, usize), usize>,
    /// The number of the last item of any stream: a place in a stream never lies in a later one with its handle.
    last: u64,
    /// The number of streams that are destroyed and not dropped yet.
    destroyed: usize,
    /// The handles of destroyed streams, which no stream has now.
    gone: BTreeSet<usize>,
    /// The number of calls that were given one of them.
    pub uses_of_gone: u64,
    /// Gates are open up to this number.
    open_until: u64,
    pub captures: Captures,
}

fn is_legacy(id: usize) -> bool {
    id < FIRST_OF_THREADS
}

impl Streams {
    pub fn create(&mut self, id: usize, device: usize, is_blocking: bool) {
        let stream = Stream {
            device,
            is_blocking,
            is_alive: true,
            queue: VecDeque::new(),
            enqueued: self.last,
            ran: self.last,
            queries: 0,
            capture: None,
        };
        self.gone.remove(&id);
        self.all.insert(id, stream);
    }

    /// The handle of a destroyed stream that has nothing left to do, for the next stream.
    pub fn used_handle(&self) -> Option<usize> {
        self.gone.iter().copied().find(|handle| !self.all.contains_key(handle))
    }

    /// The stream that a handle means where `device` is the current one. The default stream has several handles.
    pub fn resolve(&mut self, handle: usize, device: usize) -> Outcome<usize> {
        if handle <= PER_THREAD {
            let id = if handle == PER_THREAD { self.of_thread(device) } else { device };
            if !self.all.contains_key(&id) {
                self.create(id, device, true);
            }
            return Ok(id);
        }
        let stream = self.all.get(&handle).filter(|stream| stream.is_alive && handle >= FIRST_HANDLE);
        match stream {
            Some(stream) if stream.device == device => Ok(handle),
            _ => {
                self.uses_of_gone += u64::from(self.gone.contains(&handle));
                Err(INVALID_HANDLE)
            }
        }
    }

    /// The default stream that this thread has for itself on a device.
    fn of_thread(&mut self, device: usize) -> usize {
        let next = FIRST_OF_THREADS + self.of_threads.len();
        *self.of_threads.entry((threads::number(), device)).or_insert(next)
    }

    /// Forgets a handle. What was enqueued still runs, as late as before.
    pub fn destroy(&mut self, id: usize) -> Outcome {
        if id < FIRST_HANDLE {
            return Err(INVALID_HANDLE);
        }
        let stream = self.all.get_mut(&id).ok_or(INVALID_HANDLE)?;
        self.destroyed += usize::from(stream.is_alive);
        stream.is_alive = false;
        self.gone.insert(id);
        if let Some(capture) = stream.capture {
            self.captures.invalidate(capture);
        }
        self.sweep();
        Ok(())
    }

    /// The device of a stream whose handle may be used.
    pub fn device_of(&self, id: usize) -> Option<usize> {
        self.all.get(&id).filter(|stream| stream.is_alive).map(|stream| stream.device)
    }

    /// Enqueues work, or records it in the stream's capture.
    pub fn push(&mut self, id: usize, work: Work) -> Outcome {
        match self.capture_of(id) {
            Some(capture) => self.captures.push(capture, id, work),
            None => self.enqueue(id, Item::Work(work)).map(|_| ()),
        }
    }

    fn enqueue(&mut self, id: usize, item: Item) -> Outcome<u64> {
        self.check_default(id)?;
        let stream = self.all.get_mut(&id).ok_or(INVALID_HANDLE)?;
        self.last += 1;
        stream.enqueued = self.last;
        stream.queries = 0;
        stream.queue.push_back((stream.enqueued, item));
        Ok(stream.enqueued)
    }

    /// The capture of a stream that is tied to this one, if it is a legacy stream: it cannot be used meanwhile.
    pub fn tied(&self, id: usize) -> Option<usize> {
        if !is_legacy(id) || self.captures.are_over() {
            return None;
        }
        let mut tied = self.all.values().filter(|stream| stream.device == id && stream.is_blocking);
        tied.find_map(|stream| stream.capture)
    }

    /// Spoils the capture that forbids the use of a stream, if there is one, and fails.
    pub fn check_default(&mut self, id: usize) -> Outcome {
        let Some(capture) = self.tied(id) else { return Ok(()) };
        self.captures.invalidate(capture);
        Err(CAPTURE_IMPLICIT)
    }

    /// Spoils all captures of a device's streams, and fails if there are any: no mode allows waits that encompass a
    /// device.
    pub fn forbid_on(&mut self, device: usize) -> Outcome {
        let mut result = Ok(());
        for stream in self.all.values().filter(|stream| stream.device == device) {
            if let Some(capture) = stream.capture {
                self.captures.invalidate(capture);
                result = Err(CAPTURE_UNSUPPORTED);
            }
        }
        result
    }

    /// Copies, fills and launches that have not run, of one stream or of all.
    pub fn pending(&self, id: Option<usize>) -> usize {
        let is_work = |(_, item): &&(u64, Item)| matches!(item, Item::Work(_));
        let streams = self.all.iter().filter(|(at, _)| id.is_none_or(|id| **at == id));
        streams.map(|(_, stream)| stream.queue.iter().filter(is_work).count()).sum()
    }

    /// The end of a stream as it is now.
    pub fn end(&self, id: usize) -> Position {
        Position { stream: id, number: self.all.get(&id).map_or(0, |stream| stream.enqueued) }
    }

    /// The ends of all streams of a device, or of all devices.
    pub fn ends(&self, device: Option<usize>) -> Vec<Position> {
        let streams =
            self.all.iter().filter(|(_, stream)| device.is_none_or(|device| stream.device == device));
        streams.map(|(&id, stream)| Position { stream: id, number: stream.enqueued }).collect()
    }

    /// A place behind all that a stream has now, which is not there before somebody lets it run.
    pub fn mark(&mut self, id: usize) -> Outcome<Position> {
        Ok(Position { stream: id, number: self.enqueue(id, Item::Mark)? })
    }

    /// Lets later work of a stream come after a place in another, if that is not reached yet.
    pub fn order(&mut self, id: usize, after: Position) -> Outcome {
        if let Some(capture) = self.capture_of(id) {
            if self.is_reached(after) {
                return Ok(());
            }
            self.captures.invalidate(capture);
            return Err(CAPTURE_ISOLATION);
        }
        if after.stream != id {
            self.enqueue(id, Item::Wait { stream: after.stream, number: after.number })?;
        }
        Ok(())
    }

    pub fn is_reached(&self, position: Position) -> bool {
        self.all.get(&position.stream).is_none_or(|stream| stream.ran >= position.number)
    }

    /// The number of times that a stream was asked whether it is done, this time included.
    pub fn asked(&mut self, id: usize) -> u64 {
        let Some(stream) = self.all.get_mut(&id) else { return 0 };
        stream.queries += 1;
        stream.queries
    }

    /// Closes a stream for what is enqueued from now on, until [`Streams::open_gates`].
    pub fn close_gate(&mut self, id: usize) -> Outcome {
        self.enqueue(id, Item::Gate).map(|_| ())
    }

    /// Opens all gates that there are.
    pub fn open_gates(&mut self) {
        self.open_until = self.last;
    }

    /// Runs a stream up to a place, and what it waits for; no further than to a gate.
    pub fn run(&mut self, until: Position, executor: &mut Executor) {
        while let Some((number, item)) = self.all.get(&until.stream).and_then(|stream| stream.queue.front())
            && *number <= until.number
        {
            let number = *number;
            match item {
                Item::Work(work) => executor.execute(work),
                Item::Mark => (),
                Item::Gate if number <= self.open_until => (),
                Item::Gate => return,
                // No deeper than there are streams: what a stream waits for was enqueued before it waited.
                &Item::Wait { stream, number } => {
                    let after = Position { stream, number };
                    self.run(after, executor);
                    if !self.is_reached(after) {
                        return;
                    }
                }
            }
            if let Some(stream) = self.all.get_mut(&until.stream) {
                stream.queue.pop_front();
                stream.ran = number;
            }
        }
    }

    /// Drops streams that are destroyed and done.
    pub fn sweep(&mut self) {
        if self.destroyed > 0 {
            let before = self.all.len();
            self.all.retain(|_, stream| stream.is_alive || !stream.queue.is_empty());
            self.destroyed -= before - self.all.len();
        }
    }

    pub fn capture_of(&self, id: usize) -> Option<usize> {
        self.all.get(&id)?.capture
    }

    /// Records from now on what is enqueued on a stream.
    pub fn begin_capture(&mut self, id: usize, mode: Mode) -> Outcome {
        if is_legacy(id) {
            return Err(CAPTURE_UNSUPPORTED);
        }
        let stream = self.all.get_mut(&id).ok_or(INVALID_HANDLE)?;
        stream.capture = Some(self.captures.begin(id, stream.capture, mode)?);
        Ok(())
    }

    /// Lets a stream come after a place of a capture, in which it takes part from then on.
    pub fn join_capture(&mut self, id: usize, place: &Place) -> Outcome {
        if is_legacy(id) {
            self.captures.invalidate(place.capture);
            return Err(CAPTURE_IMPLICIT);
        }
        let stream = self.all.get_mut(&id).ok_or(INVALID_HANDLE)?;
        self.captures.join(id, stream.capture, place)?;
        stream.capture = Some(place.capture);
        Ok(())
    }

    /// Ends a capture; the number of its graph.
    pub fn end_capture(&mut self, id: usize) -> Outcome<usize> {
        let capture = self.capture_of(id);
        let graph = self.captures.end(id, capture);
        let is_over = capture.is_some_and(|capture| !self.captures.is_active(capture));
        for stream in self.all.values_mut().filter(|stream| is_over && stream.capture == capture) {
            stream.capture = None;
        }
        graph
    }

    /// Enqueues what a graph has.
    pub fn replay(&mut self, graph: usize, id: usize) -> Outcome {
        let work = self.captures.graph(graph)?;
        work.iter().try_for_each(|work| self.push(id, work.clone()))
    }
}
