//! Fills and copies: what they may touch, and when they take it.

use crate::codes::{INVALID_VALUE, Outcome};
use crate::memory::Place;
use crate::operations::check;
use crate::state::State;
use crate::work::{Rows, Work};

/// `CU_DEVICE_ATTRIBUTE_MAX_PITCH`: the most bytes from a row to the next.
const MOST_PITCH: usize = i32::MAX as usize;

/// The places where the sides of a copy may be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    ToDevice,
    ToHost,
    OnDevice,
    /// The addresses say which.
    Any,
}

/// The place where a side of a copy has to lie.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// A place where a device reaches it: its own memory, or page-locked.
    Device,
    Host,
    Any,
}

impl Side {
    fn takes(self, place: Place) -> bool {
        match place {
            Place::Nowhere => false,
            Place::Device(_) => self != Self::Host,
            Place::Locked => true,
            Place::Pageable => self != Self::Device,
        }
    }
}

impl Direction {
    /// The sides of the target and of the source.
    fn sides(self) -> [Side; 2] {
        match self {
            Self::ToDevice => [Side::Device, Side::Host],
            Self::ToHost => [Side::Host, Side::Device],
            Self::OnDevice => [Side::Device; 2],
            Self::Any => [Side::Any; 2],
        }
    }
}

impl State {
    pub fn fill(&mut self, device: usize, target: usize, value: u8, len: usize, stream: usize) -> Outcome {
        let id = self.streams.resolve(stream, device)?;
        if len == 0 {
            return Ok(());
        }
        check(matches!(self.memory.place(target, len), Place::Device(_) | Place::Locked), INVALID_VALUE)?;
        self.make_room(id)?;
        self.streams.push(id, Work::Fill { target, value, len })
    }

    /// Enqueues a copy. One to pageable memory is waited for. One from pageable memory takes the bytes at once.
    pub fn copy(
        &mut self,
        device: usize,
        [target, source]: [usize; 2],
        len: usize,
        direction: Direction,
        stream: usize,
    ) -> Outcome {
        let rows = Rows { target, source, pitches: [len; 2], width: len, height: 1 };
        self.copy_rows(device, rows, direction.sides(), stream)
    }

    /// Copies several rows. What lies between the first byte and the last must be of one block, on both sides.
    pub fn copy_rows(&mut self, device: usize, rows: Rows, sides: [Side; 2], stream: usize) -> Outcome {
        let id = self.streams.resolve(stream, device)?;
        let is_pitch = |pitch| rows.height == 1 || (rows.width..=MOST_PITCH).contains(&pitch);
        check(rows.pitches.into_iter().all(is_pitch), INVALID_VALUE)?;
        if rows.width == 0 || rows.height == 0 {
            return Ok(());
        }
        check(rows.target != 0 && rows.source != 0, INVALID_VALUE)?;
        let spans = [rows.span(0).ok_or(INVALID_VALUE)?, rows.span(1).ok_or(INVALID_VALUE)?];
        let places = [self.memory.place(rows.target, spans[0]), self.memory.place(rows.source, spans[1])];
        check((0..2).all(|at| sides[at].takes(places[at])), INVALID_VALUE)?;
        if places.contains(&Place::Pageable) {
            self.uncaptured(device, stream)?;
            // The driver stages the bytes, and waits: that is unsafe beside captures of others.
            self.streams.captures.forbid()?;
        }
        self.make_room(id)?;
        if places[0] == Place::Pageable {
            self.wait_for(self.streams.end(id))?;
            let is_pageable = places.map(|place| place == Place::Pageable);
            self.streams.push(id, Work::Copy { rows, is_pageable })?;
            self.run(self.streams.end(id));
            return Ok(());
        }
        if places[1] == Place::Pageable {
            // SAFETY: the caller promises so many readable bytes.
            let bytes = unsafe { std::slice::from_raw_parts(rows.source as *const u8, spans[1]) };
            return self.streams.push(id, Work::Bytes { rows, bytes: bytes.into() });
        }
        self.streams.push(id, Work::Copy { rows, is_pageable: [false; 2] })
    }

    /// Copies, and waits for the default stream.
    pub fn copy_now(
        &mut self,
        device: usize,
        sides: [usize; 2],
        len: usize,
        direction: Direction,
    ) -> Outcome {
        self.streams.captures.forbid()?;
        self.copy(device, sides, len, direction, 0)?;
        self.synchronize_stream(device, 0)
    }
}
