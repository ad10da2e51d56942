//! The workspace arena: tensors and segments that do not overlap, first fit, all freed at once.

use kvpool::base::{DType, Device, Dims, ErrorKind};
use kvpool::memory::ALIGNMENT;
use kvpool::pool::{Workspace, WorkspaceConfig, give_back_segment, take_segment};
use kvpool::tensor::TensorView;

use super::{STREAM, Source, agree, bytes_of, contents, host, refused};

/// A taken range of the arena: its start and its length in alignments.
type Extent = (usize, usize);

struct Arena {
    workspace: Workspace,
    poison: bool,
    /// The address of the arena, once it is known.
    base: Option<usize>,
    tensors: Vec<(Extent, TensorView, u8)>,
    segments: Vec<Extent>,
    high_water: usize,
    marks: u8,
}

pub(super) fn run(source: &mut Source<'_>) {
    let bytes = 1 + source.below(8000);
    let poison = source.flip();
    let config = WorkspaceConfig { arena_bytes: bytes, poison };
    let workspace = Workspace::new(&config, &host()).expect("memory");
    let (tensors, segments) = (Vec::new(), Vec::new());
    let mut arena = Arena { workspace, poison, base: None, tensors, segments, high_water: 0, marks: 0 };
    while source.next_step() {
        arena.step(source);
        arena.check();
    }
    // The list of segments is global: this history must leave nothing in it.
    for (start, _) in std::mem::take(&mut arena.segments) {
        give_back_segment(arena.base.expect("known") + start);
    }
}

impl Arena {
    fn step(&mut self, source: &mut Source<'_>) {
        match source.below(16) {
            0..=6 => self.cut(source),
            7..=9 => self.take_segment(source),
            10..=12 => {
                if !self.segments.is_empty() {
                    let (start, _) = self.segments.swap_remove(source.below(self.segments.len()));
                    give_back_segment(self.base.expect("known") + start);
                    // A second free has no effect.
                    give_back_segment(self.base.expect("known") + start);
                }
            }
            13 => self.on_another_thread(),
            _ => self.reset(),
        }
    }

    fn taken(&self) -> Vec<Extent> {
        let mut taken: Vec<Extent> =
            self.tensors.iter().map(|(taken, ..)| *taken).chain(self.segments.clone()).collect();
        taken.sort_unstable();
        taken
    }

    /// The place of a new range: after all others, or in the first gap that is long enough.
    fn place(&self, bytes: usize) -> Option<Extent> {
        let bytes = bytes.max(1).checked_next_multiple_of(ALIGNMENT)?;
        let taken = self.taken();
        let end = taken.last().map_or(0, |(start, len)| start + len);
        if bytes <= self.workspace.arena_bytes() - end {
            return Some((end, bytes));
        }
        let mut before = 0;
        for (start, len) in taken {
            if start - before >= bytes {
                return Some((before, bytes));
            }
            before = start + len;
        }
        None
    }

    fn cut(&mut self, source: &mut Source<'_>) {
        let dtype = source.of(&[DType::F32, DType::U8, DType::I64]);
        let shape: Vec<i64> = (0..source.below(3))
            .map(|_| if source.rarely(24) { source.index(100) } else { source.within(0, 60) })
            .collect();
        let shape = Dims::new(&shape).expect("two dimensions");
        let is_zero = source.flip();
        let bytes = shape.bytes(dtype).map_err(|_| ErrorKind::Argument.into());
        let place = bytes.and_then(|bytes| self.place(bytes).ok_or(ErrorKind::WorkspaceExhausted.into()));
        let answer = if is_zero {
            self.workspace.zeros(shape, dtype, STREAM)
        } else {
            self.workspace.empty(shape, dtype, STREAM)
        };
        let Some(view) = agree(answer, &place) else { return };
        let (start, len) = place.expect("it was right");
        assert_eq!(view.offset(), start);
        let bytes = shape.bytes(dtype).expect("it was right");
        let found = bytes_of(&view);
        assert!(found.len() == bytes && (!is_zero || found.iter().all(|&byte| byte == 0)));
        self.base = Some(view.region().address().as_ptr().addr());
        self.marks = self.marks.wrapping_add(1);
        contents::fill(view.region(), start, bytes, self.marks);
        self.tensors.push(((start, len), view, self.marks));
    }

    fn take_segment(&mut self, source: &mut Source<'_>) {
        let bytes = if source.rarely(16) { usize::MAX } else { source.below(3000) };
        assert_eq!(take_segment(bytes, Device::Cpu, Ok(STREAM)), None, "the workspace is not entered");
        self.workspace.enter().expect("of this thread");
        assert_eq!(take_segment(bytes, Device::Cuda(0), Ok(STREAM)), None, "of another device");
        refused(self.workspace.reset(STREAM), ErrorKind::State);
        let place = self.place(bytes);
        let address = take_segment(bytes, Device::Cpu, Ok(STREAM));
        let failed = self.workspace.leave().expect("it was entered");
        assert_eq!((address.is_some(), failed.is_none()), (place.is_some(), place.is_some()));
        if let (Some(address), Some(place)) = (address, place) {
            assert_eq!(address - *self.base.get_or_insert(address - place.0), place.0);
            self.segments.push(place);
        }
        refused(self.workspace.leave(), ErrorKind::State);
    }

    /// The workspace belongs to this thread while a tensor of it is in use.
    fn on_another_thread(&self) {
        let shape = Dims::new(&[1 << 40]).expect("one dimension");
        let answer = std::thread::scope(|scope| {
            let asked = scope.spawn(|| self.workspace.empty(shape, DType::U8, STREAM));
            asked.join().expect("no panic").expect_err("far too much")
        });
        let is_taken = !self.taken().is_empty();
        let expected = if is_taken { ErrorKind::State } else { ErrorKind::WorkspaceExhausted };
        assert_eq!(answer.kind(), expected);
    }

    fn reset(&mut self) {
        let expected = self.segments.is_empty();
        assert_eq!(self.workspace.reset(STREAM).expect("of this thread"), expected);
        if expected {
            for (_, view, _) in self.tensors.drain(..) {
                assert!(!self.poison || bytes_of(&view).iter().all(|&byte| byte == 0xff));
            }
        }
    }

    fn check(&mut self) {
        let taken = self.taken();
        let mut end = 0;
        for &(start, len) in &taken {
            assert!(start >= end && start % ALIGNMENT == 0);
            end = start + len;
        }
        assert!(end <= self.workspace.arena_bytes());
        let used = taken.iter().map(|(_, len)| len).sum();
        self.high_water = self.high_water.max(used);
        assert_eq!(self.workspace.usage(), [used, self.high_water]);
        for (_, view, mark) in &self.tensors {
            assert!(
                bytes_of(view).iter().all(|byte| byte == mark),
                "another owner has written to the tensor"
            );
        }
    }
}
