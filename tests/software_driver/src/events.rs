//! Events: names for places in streams.

use std::collections::HashMap;

use crate::capture;
use crate::codes::{INVALID_HANDLE, Outcome};
use crate::streams::Position;

/// The thing that an event names.
#[derive(Clone)]
pub enum Recorded {
    Nothing,
    At(Position),
    In(capture::Place),
}

pub struct Event {
    pub device: usize,
    /// Whether a thread that waits for it sleeps.
    pub is_blocking: bool,
    pub recorded: Recorded,
    /// The number of times that it was asked for since it was recorded.
    pub queries: u64,
}

#[derive(Default)]
pub struct Events {
    events: HashMap<usize, Event>,
}

impl Events {
    pub fn create(&mut self, handle: usize, device: usize, is_blocking: bool) {
        self.events.insert(handle, Event { device, is_blocking, recorded: Recorded::Nothing, queries: 0 });
    }

    pub fn get(&mut self, handle: usize) -> Outcome<&mut Event> {
        self.events.get_mut(&handle).ok_or(INVALID_HANDLE)
    }

    /// Forgets an event. Who waits for it goes on waiting.
    pub fn destroy(&mut self, handle: usize) -> Outcome {
        self.events.remove(&handle).map(|_| ()).ok_or(INVALID_HANDLE)
    }
}
