//! Captures: work that is recorded instead of enqueued, and the graphs that they become.
//!
//! Work of all streams of a capture is kept in the order of the calls, which is one of those that a device may choose.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::codes::{
    CAPTURE_INVALIDATED, CAPTURE_MERGE, CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED, INVALID_VALUE, Outcome,
};
use crate::work::Work;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: i32 = 2;

thread_local! {
    /// What this thread may do while somebody captures: `CUstreamCaptureMode`, at first global.
    static MODE: Cell<i32> = const { Cell::new(0) };
}

/// Sets the mode of this thread; the one that it had.
pub fn exchange_mode(mode: i32) -> i32 {
    MODE.replace(mode)
}

struct Capture {
    origin: usize,
    work: Vec<Work>,
    /// Nothing that is forbidden was done meanwhile.
    is_valid: bool,
    /// It forbids what is forbidden to every thread.
    is_global: bool,
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
    /// By the numbers of the captures, from 1 on.
    graphs: BTreeMap<usize, Arc<[Work]>>,
}

impl Captures {
    pub fn begin(&mut self, origin: usize, current: Option<usize>, is_global: bool) -> Outcome<usize> {
        if current.is_some() {
            return Err(INVALID_VALUE);
        }
        self.begun += 1;
        self.active.insert(self.begun, Capture { origin, work: Vec::new(), is_valid: true, is_global });
        Ok(self.begun)
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

    /// For calls that must not be made while anybody captures: spoils the captures and fails.
    pub fn forbid(&mut self) -> Outcome {
        if MODE.get() == RELAXED {
            return Ok(());
        }
        let mut result = Ok(());
        for capture in self.active.values_mut().filter(|capture| capture.is_global) {
            capture.is_valid = false;
            result = Err(CAPTURE_UNSUPPORTED);
        }
        result
    }

    pub fn check(&self, capture: usize) -> Outcome {
        let is_valid = self.active.get(&capture).is_some_and(|capture| capture.is_valid);
        if is_valid { Ok(()) } else { Err(CAPTURE_INVALIDATED) }
    }

    pub fn push(&mut self, capture: usize, work: Work) -> Outcome {
        self.check(capture)?;
        if let Some(capture) = self.active.get_mut(&capture) {
            capture.work.push(work);
        }
        Ok(())
    }

    /// Whether a stream that is in `current` may take part in `capture`.
    pub fn join(&mut self, current: Option<usize>, capture: usize) -> Outcome {
        if current.is_some_and(|current| current != capture) {
            self.invalidate(capture);
            return Err(CAPTURE_MERGE);
        }
        self.check(capture)
    }

    /// Ends the capture of a stream. It must have begun there, and is over even when it was spoilt.
    pub fn end(&mut self, stream: usize, capture: Option<usize>) -> Outcome<usize> {
        let capture = capture.ok_or(INVALID_VALUE)?;
        if self.active.get(&capture).is_some_and(|held| held.origin != stream) {
            self.invalidate(capture);
            return Err(CAPTURE_UNMATCHED);
        }
        let ended = self.active.remove(&capture).ok_or(INVALID_VALUE)?;
        if !ended.is_valid {
            return Err(CAPTURE_INVALIDATED);
        }
        self.graphs.insert(capture, ended.work.into());
        Ok(capture)
    }

    /// What a graph has.
    pub fn graph(&self, graph: usize) -> Outcome<Arc<[Work]>> {
        self.graphs.get(&graph).cloned().ok_or(INVALID_VALUE)
    }
}
