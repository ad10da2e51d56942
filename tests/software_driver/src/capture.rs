//! Captures: work that is recorded instead of enqueued, and the graphs that they become.
//!
//! Work of all streams of a capture is kept in the order of the calls, which is one of those that a device may choose.
//! Beside it stands how far each stream is and how far each of the others was where it was awaited, so that a stream
//! that joined and was not awaited at the end is found.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::codes::{
    CAPTURE_INVALIDATED, CAPTURE_MERGE, CAPTURE_UNJOINED, CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED,
    CAPTURE_WRONG_THREAD, ILLEGAL_STATE, INVALID_VALUE, Outcome,
};
use crate::threads::{self, Mode};
use crate::work::Work;

/// The streams of a capture, each with the number of its last step that lies before a place.
type Reached = BTreeMap<usize, u64>;

/// A place in a capture, which an event names.
#[derive(Clone)]
pub struct Place {
    pub capture: usize,
    reached: Arc<Reached>,
}

struct Capture {
    origin: usize,
    work: Vec<Work>,
    /// Whether nothing that is forbidden was done meanwhile.
    is_valid: bool,
    mode: Mode,
    /// The thread that began it.
    owner: usize,
    /// The steps before the end of each stream that takes part, its own last step included.
    streams: BTreeMap<usize, Reached>,
}

/// `CUstreamCaptureStatus`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Status {
    None = 0,
    Active = 1,
    Invalidated = 2,
}

#[derive(Default)]
pub struct Captures {
    active: BTreeMap<usize, Capture>,
    begun: usize,
    /// The graphs by the numbers of the captures, from 1 on.
    graphs: BTreeMap<usize, Arc<[Work]>>,
}

impl Capture {
    /// Counts a step of a stream.
    fn step(&mut self, stream: usize) {
        *self.streams.entry(stream).or_default().entry(stream).or_default() += 1;
    }

    /// Lets what a stream does from now on come after a place.
    fn order(&mut self, stream: usize, after: &Reached) {
        let reached = self.streams.entry(stream).or_default();
        for (&other, &number) in after {
            let known = reached.entry(other).or_default();
            *known = number.max(*known);
        }
    }

    /// Whether the origin awaited all that the others did.
    fn is_joined(&self) -> bool {
        let at_end = self.streams.get(&self.origin);
        self.streams
            .iter()
            .all(|(stream, reached)| at_end.is_some_and(|at_end| at_end.get(stream) >= reached.get(stream)))
    }
}

impl Captures {
    pub fn begin(&mut self, origin: usize, current: Option<usize>, mode: Mode) -> Outcome<usize> {
        if current.is_some() {
            return Err(INVALID_VALUE);
        }
        self.begun += 1;
        let owner = threads::number();
        let streams = BTreeMap::from([(origin, Reached::new())]);
        let capture = Capture { origin, work: Vec::new(), is_valid: true, mode, owner, streams };
        self.active.insert(self.begun, capture);
        Ok(self.begun)
    }

    /// Whether nothing is recorded now.
    pub fn are_over(&self) -> bool {
        self.active.is_empty()
    }

    pub fn is_active(&self, capture: usize) -> bool {
        self.active.contains_key(&capture)
    }

    pub fn status(&self, capture: Option<usize>) -> Status {
        match capture.and_then(|capture| self.active.get(&capture)) {
            None => Status::None,
            Some(capture) if capture.is_valid => Status::Active,
            Some(_) => Status::Invalidated,
        }
    }

    pub fn invalidate(&mut self, capture: usize) {
        if let Some(capture) = self.active.get_mut(&capture) {
            capture.is_valid = false;
        }
    }

    /// Spoils the captures that forbid calls to this thread that are potentially unsafe while somebody captures, and
    /// fails if there are any.
    pub fn forbid(&mut self) -> Outcome {
        let (thread, mode) = (threads::number(), threads::mode());
        let mut result = Ok(());
        for capture in self.active.values_mut() {
            let is_own = capture.owner == thread && capture.mode != Mode::Relaxed;
            let is_everybodys = capture.mode == Mode::Global && mode == Mode::Global;
            if mode != Mode::Relaxed && (is_own || is_everybodys) {
                capture.is_valid = false;
                result = Err(CAPTURE_UNSUPPORTED);
            }
        }
        result
    }

    pub fn check(&self, capture: usize) -> Outcome {
        let is_valid = self.active.get(&capture).is_some_and(|capture| capture.is_valid);
        if is_valid { Ok(()) } else { Err(CAPTURE_INVALIDATED) }
    }

    pub fn push(&mut self, capture: usize, stream: usize, work: Work) -> Outcome {
        self.check(capture)?;
        if let Some(capture) = self.active.get_mut(&capture) {
            capture.step(stream);
            capture.work.push(work);
        }
        Ok(())
    }

    /// The end of a stream of a capture, as an event names it.
    pub fn mark(&self, capture: usize, stream: usize) -> Outcome<Place> {
        self.check(capture)?;
        let held = self.active.get(&capture).ok_or(CAPTURE_INVALIDATED)?;
        let reached = held.streams.get(&stream).cloned().unwrap_or_default();
        Ok(Place { capture, reached: Arc::new(reached) })
    }

    /// Lets a stream, which is in `current`, come after a place of a capture, and take part in it.
    pub fn join(&mut self, stream: usize, current: Option<usize>, place: &Place) -> Outcome {
        if let Some(current) = current.filter(|current| *current != place.capture) {
            self.invalidate(current);
            self.invalidate(place.capture);
            return Err(CAPTURE_MERGE);
        }
        self.check(place.capture)?;
        if let Some(capture) = self.active.get_mut(&place.capture) {
            capture.order(stream, &place.reached);
        }
        Ok(())
    }

    /// Ends the capture of a stream. It must have begun there, and is over even when it was spoilt, or another thread
    /// began it.
    pub fn end(&mut self, stream: usize, capture: Option<usize>) -> Outcome<usize> {
        let capture = capture.ok_or(ILLEGAL_STATE)?;
        let held = self.active.get(&capture).ok_or(ILLEGAL_STATE)?;
        if held.origin != stream {
            self.invalidate(capture);
            return Err(CAPTURE_UNMATCHED);
        }
        let is_others = held.mode != Mode::Relaxed && held.owner != threads::number();
        let ended = self.active.remove(&capture).ok_or(ILLEGAL_STATE)?;
        if is_others {
            return Err(CAPTURE_WRONG_THREAD);
        }
        if !ended.is_valid {
            return Err(CAPTURE_INVALIDATED);
        }
        if !ended.is_joined() {
            return Err(CAPTURE_UNJOINED);
        }
        self.graphs.insert(capture, ended.work.into());
        Ok(capture)
    }

    /// The work of a graph.
    pub fn graph(&self, graph: usize) -> Outcome<Arc<[Work]>> {
        self.graphs.get(&graph).cloned().ok_or(INVALID_VALUE)
    }
}
