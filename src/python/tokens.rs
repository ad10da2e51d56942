//! Token ids of a caller, compared in place.

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::OnceLock;

use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyType};

use crate::base::{DType, Device, EngineSlot, Error, Id, IndexVec, Result, try_push, try_with_capacity};
use crate::cache::{Tokens, not_a_token_error};
use crate::engines::hybrid::{self, SlotSource, TokenBlock, TokenSource, differ};
use crate::memory::BorrowedTensor;

use super::args;

/// Returns whether this interpreter is built to run threads without the GIL: then others may change a list or
/// resize an array while it is read, and both are copied first.
fn has_free_threads() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| Python::version_str().contains("free-threading"))
}

/// Calls `work` with the tokens of `object`: a list or a contiguous array is read in place, anything else is
/// copied first.
pub(super) fn with_tokens<R>(
    object: &Bound<'_, PyAny>,
    work: impl Fn(&dyn Tokens) -> PyResult<R>,
) -> PyResult<R> {
    if !has_free_threads()
        && let Ok(list) = object.cast::<PyList>()
    {
        let tokens = ListTokens { list, has_others: Cell::new(false) };
        let answer = work(&tokens);
        if !tokens.has_others.get() {
            return answer;
        }
        // The call has failed, and changed nothing.
    }
    if let Ok(Some(tensor)) = args::tensor_or_none(object)
        && let Ok(borrowed) = tensor.borrow()
        && borrowed.is_contiguous()
        && borrowed.device() == Device::Cpu
    {
        match borrowed.dtype() {
            DType::I32 => return work(&RawTokens::<i32>::of(&borrowed)),
            DType::I64 => return work(&RawTokens::<i64>::of(&borrowed)),
            _ => (),
        }
    }
    match args::indices(object)?.values(object.py())? {
        IndexVec::I32(values) => work(&values.as_slice()),
        IndexVec::I64(values) => work(&values.as_slice()),
    }
}

/// Appends tokens of a list to `out`. Returns `false` if one of them is not a plain int from 0 to 2**31 - 1, or
/// the list ends before.
pub(super) fn read_plain(list: &Bound<'_, PyList>, range: Range<usize>, out: &mut Vec<i32>) -> bool {
    if has_free_threads() {
        let copied = list.get_slice(range.start, range.end);
        let tokens = ListTokens { list: &copied, has_others: Cell::new(false) };
        return tokens.read(0..range.len(), out).is_ok();
    }
    ListTokens { list, has_others: Cell::new(false) }.read(range, out).is_ok()
}

/// The elements of a list, read one by one. Only plain ints are: the conversion of anything else may run
/// Python code, which must not happen under a lock.
#[derive(Debug)]
struct ListTokens<'a, 'py> {
    list: &'a Bound<'py, PyList>,
    /// Whether an element that is no plain int was met.
    has_others: Cell<bool>,
}

impl ListTokens<'_, '_> {
    fn get(&self, at: usize) -> Result<i64> {
        let index = at.cast_signed();
        // SAFETY: the interpreter's GIL is held, the object is a list, and the call checks the index.
        let item = unsafe { ffi::PyList_GetItem(self.list.as_ptr(), index) };
        if item.is_null() {
            return Err(python_error(self.list.py()));
        }
        // SAFETY: the list owns the item, and no Python code runs before its use: exact ints convert natively.
        let is_int = unsafe { ffi::PyLong_CheckExact(item) } == 1;
        if !is_int {
            self.has_others.set(true);
            return Err(Error::argument("an element is no plain int"));
        }
        let mut overflow = 0;
        // SAFETY: the item is an int, and `overflow` outlives the call.
        let value = unsafe { ffi::PyLong_AsLongLongAndOverflow(item, &raw mut overflow) };
        Ok(if overflow == 0 { value } else { i64::from(overflow) * i64::MAX })
    }

    fn token(&self, at: usize) -> Result<i32> {
        let value = self.get(at)?;
        i32::try_from(value).ok().filter(|token| *token >= 0).ok_or_else(|| not_a_token_error(value, at))
    }
}

#[cold]
fn python_error(py: Python<'_>) -> Error {
    Error::foreign(PyErr::fetch(py))
}

impl Tokens for ListTokens<'_, '_> {
    fn count(&self) -> usize {
        self.list.len()
    }

    fn common(&self, at: usize, with: &[i32]) -> Result<usize> {
        let count = with.len().min(self.count().saturating_sub(at));
        for (done, &theirs) in with[..count].iter().enumerate() {
            if self.get(at + done)? != i64::from(theirs) {
                return Ok(done);
            }
        }
        Ok(count)
    }

    fn read(&self, range: Range<usize>, out: &mut Vec<i32>) -> Result<()> {
        for at in range {
            try_push(out, self.token(at)?)?;
        }
        Ok(())
    }

    fn check(&self, mut range: Range<usize>) -> Result<()> {
        range.try_for_each(|at| self.token(at).map(drop))
    }
}

/// The elements of a contiguous array in host memory, which others may write: each is copied before it is
/// looked at.
#[derive(Debug)]
struct RawTokens<'a, T> {
    /// The first of `count` elements, which others own for `'a`. It need not be aligned.
    first: NonNull<T>,
    count: usize,
    owner: PhantomData<&'a T>,
}

/// Elements copied at a time; they stay in the nearest cache.
const BLOCK: usize = 1024;

impl<'a, T: Copy> RawTokens<'a, T> {
    fn of(borrowed: &'a BorrowedTensor<'a>) -> Self {
        assert!(borrowed.is_contiguous(), "one element follows the other");
        Self { first: borrowed.address().cast(), count: borrowed.shape().numel(), owner: PhantomData }
    }

    /// Copies the elements from `at` on that fill `to`.
    fn copy<'to>(&self, at: usize, to: &'to mut [MaybeUninit<T>]) -> &'to [T] {
        assert!(at + to.len() <= self.count, "within the array");
        // SAFETY: `at` is within the array.
        let source = unsafe { self.first.as_ptr().add(at) };
        // SAFETY: as many elements as fill `to` follow there, and `to` is not among them.
        unsafe { source.cast::<u8>().copy_to_nonoverlapping(to.as_mut_ptr().cast(), size_of_val(to)) };
        // SAFETY: all of it was written just now.
        unsafe { &*(std::ptr::from_mut(to) as *const [T]) }
    }

    /// Calls `look` with a copy of the elements of `range`, block by block, until it returns `false`.
    fn blocks(&self, range: Range<usize>, mut look: impl FnMut(&[T]) -> Result<bool>) -> Result<()> {
        let mut block = [const { MaybeUninit::uninit() }; BLOCK];
        let mut at = range.start;
        while at < range.end {
            let count = BLOCK.min(range.end - at);
            if !look(self.copy(at, &mut block[..count]))? {
                return Ok(());
            }
            at += count;
        }
        Ok(())
    }
}

impl<T: Copy + std::fmt::Debug> Tokens for RawTokens<'_, T>
where
    for<'b> &'b [T]: Tokens,
{
    fn count(&self) -> usize {
        self.count
    }

    fn common(&self, at: usize, with: &[i32]) -> Result<usize> {
        let count = with.len().min(self.count.saturating_sub(at));
        let mut done = 0;
        self.blocks(at..at + count, |block| {
            let equal = block.common(0, &with[done..done + block.len()])?;
            done += equal;
            Ok(equal == block.len())
        })?;
        Ok(done)
    }

    fn read(&self, range: Range<usize>, out: &mut Vec<i32>) -> Result<()> {
        let mut at = range.start;
        self.blocks(range, |block| {
            block.read(0..block.len(), out).map_err(|error| at_position(error, at))?;
            at += block.len();
            Ok(true)
        })
    }

    fn check(&self, range: Range<usize>) -> Result<()> {
        let mut at = range.start;
        self.blocks(range, |block| {
            block.check(0..block.len()).map_err(|error| at_position(error, at))?;
            at += block.len();
            Ok(true)
        })
    }
}

/// Creates the error of a block that begins at `begin`.
#[cold]
fn at_position(error: Error, begin: usize) -> Error {
    if begin == 0 { error } else { error.with_prefix(&format!("in the tokens from position {begin} on")) }
}

/// Calls `work` with the tokens `start..end` of `object`, 64-bit ints: an `array.array("q")` is read in
/// place, anything else is copied first. Without `end`, to the end.
pub(super) fn with_keys<R>(
    object: &Bound<'_, PyAny>,
    start: usize,
    end: Option<usize>,
    work: impl FnOnce(&dyn TokenSource) -> PyResult<R>,
) -> PyResult<R> {
    static ARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let py = object.py();
    let within = |len: usize| -> PyResult<Range<usize>> {
        let end = end.unwrap_or(len);
        if start <= end && end <= len {
            return Ok(start..end);
        }
        Err(Error::argument(format!("tokens {start}..{end} are not within the {len} given")).into())
    };
    if !has_free_threads()
        && object.get_type().is(ARRAY.import(py, "array", "array")?)
        && object.getattr(intern!(py, "typecode"))?.eq(intern!(py, "q"))?
    {
        let (address, len): (usize, usize) = object.call_method0(intern!(py, "buffer_info"))?.extract()?;
        let range = within(len)?;
        let Some(first) = NonNull::new(std::ptr::with_exposed_provenance_mut::<i64>(address)) else {
            return work(&&[][..]);
        };
        // SAFETY: the array has `len` elements from there on; it is not resized while the GIL is held, and no
        // Python code runs during `work`.
        let first = unsafe { first.add(range.start) };
        return work(&RawTokens { first, count: range.len(), owner: PhantomData });
    }
    let tokens = args::indices(object)?.values(py)?.into_i64()?;
    let range = within(tokens.len())?;
    work(&&tokens[range])
}

impl TokenSource for RawTokens<'_, i64> {
    fn count(&self) -> usize {
        self.count
    }

    fn common(&self, at: usize, with: TokenBlock<'_>) -> usize {
        assert!(at + with.len() <= self.count, "within the array");
        // SAFETY: the elements are within the array.
        let ours = unsafe { self.first.as_ptr().add(at).cast_const() };
        // SAFETY: as many elements follow as there are in `with`, and no others are asked for.
        let token_at = |at: usize| unsafe { ours.wrapping_add(at).read_unaligned() };
        let differ = match with {
            TokenBlock::Narrow(theirs) => differ(theirs, token_at),
            TokenBlock::Wide(theirs) => theirs.iter().enumerate().any(|(at, &token)| token_at(at) != token),
        };
        if !differ {
            return with.len();
        }
        let mut block = [MaybeUninit::uninit(); hybrid::BLOCK];
        with.common(self.copy(at, &mut block[..with.len()]))
    }

    fn read(&self, at: usize, count: usize, out: &mut Vec<i64>) {
        let begin = out.len();
        out.reserve(count);
        self.copy(at, &mut out.spare_capacity_mut()[..count]);
        // SAFETY: that many were written just now.
        unsafe { out.set_len(begin + count) };
    }
}

/// Calls `work` with the slots in `object`: a contiguous int32 or int64 tensor in host memory is read in
/// place, anything else is copied first.
pub(super) fn with_slots<R>(
    object: &Bound<'_, PyAny>,
    work: impl FnOnce(&dyn SlotSource, usize) -> PyResult<R>,
) -> PyResult<R> {
    if let Ok(Some(tensor)) = args::tensor_or_none(object)
        && let Ok(borrowed) = tensor.borrow()
        && borrowed.is_contiguous()
        && borrowed.device() == Device::Cpu
    {
        let count = borrowed.shape().numel();
        match borrowed.dtype() {
            DType::I32 => return work(&RawTokens::<i32>::of(&borrowed), count),
            DType::I64 => return work(&RawTokens::<i64>::of(&borrowed), count),
            _ => (),
        }
    }
    let values = args::indices(object)?.values(object.py())?;
    let count = values.len();
    let slots = slots_of(values.iter(), 0)?;
    work(&slots.as_slice(), count)
}

/// Slots from numbers, the first of them at `begin`.
pub(super) fn slots_of(numbers: impl Iterator<Item = i64>, begin: usize) -> Result<Vec<EngineSlot>> {
    let mut slots = try_with_capacity(numbers.size_hint().0)?;
    for (position, number) in numbers.enumerate() {
        let slot =
            i32::try_from(number).ok().and_then(|number| u32::try_from(number).ok()).map(EngineSlot::new);
        let slot = slot.ok_or_else(|| {
            let position = begin + position;
            Error::argument(format!("slot {number} at position {position} is outside [0, 2**31)"))
                .with_index(number)
        });
        try_push(&mut slots, slot?)?;
    }
    Ok(slots)
}

impl<T: Copy + Into<i64>> SlotSource for RawTokens<'_, T> {
    fn read(&self, at: usize, count: usize) -> Result<Vec<EngineSlot>> {
        let mut slots = try_with_capacity(count)?;
        if at + count > self.count {
            return Err(Error::argument(format!("slots {at}..{} of {} are needed", at + count, self.count)));
        }
        self.blocks(at..at + count, |block| {
            let begin = at + slots.len();
            slots.extend(slots_of(block.iter().map(|&number| number.into()), begin)?);
            Ok(true)
        })?;
        Ok(slots)
    }
}
