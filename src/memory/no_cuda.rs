//! What stands for a device where kvpool is built without the feature `cuda`: the same types, without values.

use std::ffi::CStr;
use std::sync::Arc;

use crate::base::{Device, Error, ErrorKind, Result};

use super::{Backend, Block, Borrowed, Image, Number, Plain, Region, Stream};

/// A value that cannot be made.
#[derive(Clone, Copy, Debug)]
enum Never {}

/// An NVIDIA device; there is none.
#[derive(Debug)]
pub struct Gpu(Never);

/// A kernel; there is none.
#[derive(Clone, Copy, Debug)]
pub struct Function(Never);

/// A point in a stream's work; there is none.
#[derive(Debug)]
pub struct Event(Never);

/// A ring of page-locked memory; there is none.
#[derive(Debug)]
pub struct Ring(Never);

/// A piece of a ring; there is none.
#[derive(Debug)]
pub struct Held(Never);

/// Host memory that is page-locked; there is none.
#[derive(Debug)]
pub struct PageLock(Never);

/// Memory of a device; there is none.
#[derive(Clone, Copy, Debug)]
pub struct Cuda(Never);

/// Page-locked memory; there is none.
#[derive(Clone, Copy, Debug)]
pub struct Pinned(Never);

#[expect(missing_docs, clippy::missing_errors_doc, reason = "documented where it can be called")]
impl Gpu {
    pub fn open(ordinal: u32) -> Result<Arc<Self>> {
        Err(Error::new(
            ErrorKind::BackendUnavailable,
            format!("device cuda:{ordinal} cannot be used: kvpool was built without the `cuda` feature"),
        ))
    }

    pub fn any() -> Result<Arc<Self>> {
        Self::open(0)
    }

    #[must_use]
    pub fn device(&self) -> Device {
        match self.0 {}
    }

    #[must_use]
    pub fn capability(&self) -> (u32, u32) {
        match self.0 {}
    }

    pub fn check_process(&self) -> Result<()> {
        match self.0 {}
    }

    pub fn load(&self, _images: &[Image<'_>], _names: &[&CStr]) -> Result<Vec<Function>> {
        match self.0 {}
    }

    #[expect(clippy::missing_safety_doc, reason = "documented where it can be called")]
    pub unsafe fn launch<P>(
        &self,
        _function: Function,
        _grid: [u32; 2],
        _params: &P,
        _stream: Stream,
    ) -> Result<()> {
        match self.0 {}
    }

    pub fn copy_in(
        &self,
        _target: (&Region, usize),
        _source: (&Region, usize),
        _bytes: usize,
        _stream: Stream,
    ) -> Result<()> {
        match self.0 {}
    }

    pub fn copy_out(&self, _source: &Borrowed<'_>, _target: (&Region, usize), _stream: Stream) -> Result<()> {
        match self.0 {}
    }

    pub fn copy(&self, _target: &Borrowed<'_>, _source: &Borrowed<'_>, _stream: Stream) -> Result<()> {
        match self.0 {}
    }

    pub fn copy_2d(&self, _target: &Borrowed<'_>, _source: &Borrowed<'_>, _stream: Stream) -> Result<()> {
        match self.0 {}
    }

    pub fn fill(&self, _target: (&Region, usize), _bytes: usize, _value: u8, _stream: Stream) -> Result<()> {
        match self.0 {}
    }

    pub fn synchronize(&self, _stream: Stream) -> Result<()> {
        match self.0 {}
    }

    pub fn not_capturing(&self, _stream: Stream, _what: &str) -> Result<()> {
        match self.0 {}
    }
}

#[expect(missing_docs, clippy::missing_errors_doc, reason = "documented where it can be called")]
impl Event {
    pub fn record(gpu: &Arc<Gpu>, _stream: Stream) -> Result<Self> {
        match gpu.0 {}
    }

    pub fn passed(&self) -> Result<bool> {
        match self.0 {}
    }

    pub fn wait(&self) -> Result<()> {
        match self.0 {}
    }

    pub fn precede(&self, _stream: Stream) -> Result<()> {
        match self.0 {}
    }
}

#[expect(missing_docs, clippy::missing_errors_doc, reason = "documented where it can be called")]
impl Ring {
    pub fn new(gpu: &Arc<Gpu>, _bytes: usize) -> Result<Self> {
        match gpu.0 {}
    }

    pub fn on_host(gpu: &Arc<Gpu>, _bytes: usize) -> Result<Self> {
        match gpu.0 {}
    }

    pub fn not_capturing(&self, _stream: Stream) -> Result<()> {
        match self.0 {}
    }

    pub fn upload<T: Plain>(
        &self,
        _arrays: &[&[T]],
        _target: Option<(&Region, usize)>,
        _stream: Stream,
        _work: impl FnOnce(&Region, &[usize]) -> Result<()>,
    ) -> Result<Arc<Event>> {
        match self.0 {}
    }

    pub fn receive(
        &self,
        _bytes: usize,
        _stream: Stream,
        _work: impl FnOnce(&Region, usize) -> Result<()>,
    ) -> Result<Option<Held>> {
        match self.0 {}
    }

    pub fn take<T: Number>(&self, _held: &Held, _count: usize) -> Result<Vec<T>> {
        match self.0 {}
    }

    pub fn release(&self, _held: &Held) {
        match self.0 {}
    }
}

#[expect(missing_docs, reason = "documented where it can be called")]
impl Held {
    #[must_use]
    pub fn done(&self) -> &Arc<Event> {
        match self.0 {}
    }
}

#[expect(missing_docs, clippy::missing_errors_doc, reason = "documented where it can be called")]
impl PageLock {
    pub fn new(gpu: &Arc<Gpu>, _tensor: &Borrowed<'_>) -> Result<Option<Self>> {
        match gpu.0 {}
    }
}

#[expect(missing_docs, reason = "documented where it can be called")]
impl Cuda {
    #[must_use]
    pub fn new(gpu: &Arc<Gpu>, _stream: Stream) -> Self {
        match gpu.0 {}
    }

    #[must_use]
    pub fn unwritten(gpu: &Arc<Gpu>) -> Self {
        match gpu.0 {}
    }
}

#[expect(missing_docs, reason = "documented where it can be called")]
impl Pinned {
    #[must_use]
    pub fn new(gpu: &Arc<Gpu>) -> Self {
        match gpu.0 {}
    }
}

impl Backend for Cuda {
    fn device(&self) -> Device {
        match self.0 {}
    }

    fn allocate(&self, _bytes: usize) -> Result<Block> {
        match self.0 {}
    }

    unsafe fn deallocate(&self, _block: Block) {
        match self.0 {}
    }
}

impl Backend for Pinned {
    fn device(&self) -> Device {
        match self.0 {}
    }

    fn allocate(&self, _bytes: usize) -> Result<Block> {
        match self.0 {}
    }

    unsafe fn deallocate(&self, _block: Block) {
        match self.0 {}
    }
}
