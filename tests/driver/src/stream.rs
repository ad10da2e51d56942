//! Queues of work that run late.

use std::collections::{HashMap, VecDeque};

use crate::kernels;
use crate::memory::Memory;

/// What a stream does.
#[derive(Clone)]
pub enum Work {
    Set {
        target: usize,
        value: u8,
        len: usize,
    },
    /// The bytes of pageable memory, as they were at the call.
    Bytes {
        target: usize,
        bytes: Vec<u8>,
    },
    /// From or to device memory or page-locked memory, read when it runs.
    Copy {
        target: usize,
        source: usize,
        len: usize,
    },
    Kernel {
        kernel: usize,
        params: Vec<u64>,
        grid: [u32; 2],
        threads: u32,
    },
    /// Comes after the work of another stream up to a number.
    Wait {
        stream: usize,
        number: u64,
    },
}

#[derive(Default)]
struct Stream {
    queue: VecDeque<(u64, Work)>,
    /// The number of the last work that was enqueued, and of the last that ran.
    enqueued: u64,
    ran: u64,
    /// What was recorded since a capture began.
    capture: Option<Vec<Work>>,
}

#[derive(Clone, Copy, Default)]
struct Event {
    /// The stream and the number of its work after which the event lies.
    record: Option<(usize, u64)>,
    queries: u64,
}

pub struct Streams {
    /// By handle; 0 is the default stream.
    queues: HashMap<usize, Stream>,
    events: HashMap<usize, Event>,
    graphs: Vec<Vec<Work>>,
    /// With so many queries an event runs what lies before it.
    pub patience: u64,
}

impl Default for Streams {
    fn default() -> Self {
        let queues = HashMap::from([(0, Stream::default())]);
        Self { queues, events: HashMap::new(), graphs: Vec::new(), patience: 3 }
    }
}

impl Streams {
    pub fn create(&mut self, handle: usize) {
        self.queues.insert(handle, Stream::default());
    }

    pub fn destroy(&mut self, handle: usize, memory: &Memory) -> bool {
        if handle == 0 || !self.exists(handle) {
            return false;
        }
        self.run_all_of(handle, memory);
        self.queues.remove(&handle).is_some()
    }

    /// 1 and 2 are the legacy and the per-thread default stream.
    pub fn exists(&self, handle: usize) -> bool {
        self.queues.contains_key(&canonical(handle))
    }

    pub fn count(&self) -> usize {
        self.queues.len()
    }

    pub fn enqueue(&mut self, handle: usize, work: Work) {
        let Some(stream) = self.queues.get_mut(&canonical(handle)) else { return };
        if let Some(capture) = &mut stream.capture {
            capture.push(work);
            return;
        }
        stream.enqueued += 1;
        stream.queue.push_back((stream.enqueued, work));
    }

    pub fn pending(&self, handle: Option<usize>) -> usize {
        match handle {
            Some(handle) => self.queues.get(&canonical(handle)).map_or(0, |stream| stream.queue.len()),
            None => self.queues.values().map(|stream| stream.queue.len()).sum(),
        }
    }

    /// Runs the work of a stream up to `number`, and what it waits for.
    fn run(&mut self, handle: usize, number: u64) {
        loop {
            let Some(stream) = self.queues.get_mut(&handle) else { return };
            match stream.queue.front() {
                Some((next, _)) if *next <= number => (),
                _ => return,
            }
            let Some((next, work)) = stream.queue.pop_front() else { return };
            if let Work::Wait { stream, number } = work {
                self.run(stream, number);
            } else {
                execute(work);
            }
            if let Some(stream) = self.queues.get_mut(&handle) {
                stream.ran = next;
            }
        }
    }

    pub fn run_all_of(&mut self, handle: usize, memory: &Memory) {
        if self.pending(Some(handle)) > 0 {
            memory.open(true);
            self.run(canonical(handle), u64::MAX);
            memory.open(false);
        }
    }

    pub fn run_everything(&mut self, memory: &Memory) {
        let handles: Vec<usize> = self.queues.keys().copied().collect();
        for handle in handles {
            self.run_all_of(handle, memory);
        }
    }

    pub fn create_event(&mut self, handle: usize) {
        self.events.insert(handle, Event::default());
    }

    pub fn destroy_event(&mut self, handle: usize) -> bool {
        self.events.remove(&handle).is_some()
    }

    pub fn events(&self) -> usize {
        self.events.len()
    }

    pub fn is_event(&self, handle: usize) -> bool {
        self.events.contains_key(&handle)
    }

    pub fn record(&mut self, event: usize, handle: usize) -> bool {
        let Some(enqueued) = self.queues.get(&canonical(handle)).map(|stream| stream.enqueued) else {
            return false;
        };
        let record = Some((canonical(handle), enqueued));
        self.events.get_mut(&event).map(|event| *event = Event { record, queries: 0 }).is_some()
    }

    /// Whether the work before an event has run; asked often enough, it runs.
    pub fn query(&mut self, event: usize, memory: &Memory) -> bool {
        let patience = self.patience;
        let Some(event_state) = self.events.get_mut(&event) else { return false };
        let Some((stream, number)) = event_state.record else { return true };
        event_state.queries += 1;
        let is_over = event_state.queries >= patience;
        if self.queues.get(&stream).is_none_or(|stream| stream.ran >= number) {
            return true;
        }
        if is_over {
            self.wait(event, memory);
        }
        is_over
    }

    /// Runs the work before an event.
    pub fn wait(&mut self, event: usize, memory: &Memory) {
        if let Some((stream, number)) = self.events.get(&event).and_then(|event| event.record) {
            memory.open(true);
            self.run(stream, number);
            memory.open(false);
        }
    }

    /// Lets later work of a stream come after an event as it is recorded now.
    pub fn order(&mut self, handle: usize, event: usize) {
        if let Some((stream, number)) = self.events.get(&event).and_then(|event| event.record)
            && stream != canonical(handle)
        {
            self.enqueue(handle, Work::Wait { stream, number });
        }
    }

    pub fn is_capturing(&self, handle: usize) -> bool {
        self.queues.get(&canonical(handle)).is_some_and(|stream| stream.capture.is_some())
    }

    pub fn is_any_capturing(&self) -> bool {
        self.queues.values().any(|stream| stream.capture.is_some())
    }

    pub fn begin_capture(&mut self, handle: usize) -> bool {
        let stream = self.queues.get_mut(&canonical(handle));
        stream.is_some_and(|stream| stream.capture.replace(Vec::new()).is_none())
    }

    /// The number of the graph that was captured.
    pub fn end_capture(&mut self, handle: usize) -> Option<usize> {
        let work = self.queues.get_mut(&canonical(handle))?.capture.take()?;
        self.graphs.push(work);
        Some(self.graphs.len() - 1)
    }

    pub fn replay(&mut self, graph: usize, handle: usize) -> bool {
        let Some(work) = self.graphs.get(graph).cloned() else { return false };
        for work in work {
            self.enqueue(handle, work);
        }
        true
    }
}

/// The default stream has several names.
fn canonical(handle: usize) -> usize {
    if handle <= 2 { 0 } else { handle }
}

/// Does work, with device memory open.
fn execute(work: Work) {
    match work {
        // SAFETY: the range was checked to be device memory when the work was enqueued.
        Work::Set { target, value, len } => unsafe { std::ptr::write_bytes(target as *mut u8, value, len) },
        Work::Bytes { target, bytes } => {
            // SAFETY: as above; the bytes are ours.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target as *mut u8, bytes.len()) };
        }
        // SAFETY: both ranges were checked; page-locked memory stays so until the work of every stream has run.
        Work::Copy { target, source, len } => unsafe {
            std::ptr::copy(source as *const u8, target as *mut u8, len);
        },
        Work::Kernel { kernel, params, grid, threads } => kernels::run(kernel, &params, grid, threads),
        Work::Wait { .. } => (),
    }
}
