//! Token ids of a caller, compared where they lie.

use std::cell::Cell;
use std::ops::Range;
use std::ptr::NonNull;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::base::{DType, Device, Error, IndexVec, Result};
use crate::cache::{Tokens, not_a_token};
use crate::memory::Borrowed;

use super::args;

/// Calls `work` with the tokens of `object`: a list or a contiguous array is read in place, anything else is
/// copied first.
pub(super) fn with_tokens<R>(
    object: &Bound<'_, PyAny>,
    work: impl Fn(&dyn Tokens) -> PyResult<R>,
) -> PyResult<R> {
    if let Ok(list) = object.cast::<PyList>() {
        let tokens = ListTokens { list, has_others: Cell::new(false) };
        let answer = work(&tokens);
        if !tokens.has_others.get() {
            return answer;
        }
        // The call has failed, and changed nothing.
    }
    if let Some(tensor) = args::tensor_or_none(object)? {
        let borrowed = tensor.borrow()?;
        if borrowed.is_contiguous() && borrowed.device() == Device::Cpu {
            match borrowed.dtype() {
                DType::I32 => return work(&RawTokens::<i32>::of(&borrowed)),
                DType::I64 => return work(&RawTokens::<i64>::of(&borrowed)),
                _ => (),
            }
        }
    }
    match args::indices(object)?.values(object.py())? {
        IndexVec::I32(values) => work(&values.as_slice()),
        IndexVec::I64(values) => work(&values.as_slice()),
    }
}

/// The elements of a list, read one by one. Only plain ints are: the conversion of anything else may run Python
/// code, which must not happen under a lock.
#[derive(Debug)]
struct ListTokens<'a, 'py> {
    list: &'a Bound<'py, PyList>,
    /// Whether an element that is no plain int was met.
    has_others: Cell<bool>,
}

impl ListTokens<'_, '_> {
    fn get(&self, at: usize) -> Result<i64> {
        let index = at.cast_signed();
        // SAFETY: the GIL is held, the object is a list, and the call checks the index.
        let item = unsafe { ffi::PyList_GetItem(self.list.as_ptr(), index) };
        if item.is_null() {
            return Err(raised(self.list.py()));
        }
        // SAFETY: the list owns the item, and no Python code runs before its use: exact ints convert natively.
        let is_int = unsafe { ffi::PyLong_CheckExact(item) } == 1;
        if !is_int {
            self.has_others.set(true);
            return Err(Error::config("an element is no plain int"));
        }
        let mut overflow = 0;
        // SAFETY: the item is an int, and `overflow` outlives the call.
        let value = unsafe { ffi::PyLong_AsLongLongAndOverflow(item, &raw mut overflow) };
        Ok(if overflow == 0 { value } else { i64::from(overflow) * i64::MAX })
    }

    fn token(&self, at: usize) -> Result<i32> {
        let value = self.get(at)?;
        i32::try_from(value).ok().filter(|token| *token >= 0).ok_or_else(|| not_a_token(value, at))
    }
}

#[cold]
fn raised(py: Python<'_>) -> Error {
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
            out.push(self.token(at)?);
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
    first: NonNull<T>,
    count: usize,
    borrowed: &'a Borrowed<'a>,
}

/// Elements copied at a time; they stay in the nearest cache.
const BLOCK: usize = 1024;

impl<'a, T: Copy + Default> RawTokens<'a, T> {
    fn of(borrowed: &'a Borrowed<'a>) -> Self {
        Self { first: borrowed.address().cast(), count: borrowed.shape().numel(), borrowed }
    }

    /// Calls `look` with a copy of the elements of `range`, block by block, until it returns `false`.
    fn blocks(&self, range: Range<usize>, mut look: impl FnMut(&[T]) -> Result<bool>) -> Result<()> {
        assert!(range.end <= self.count && self.borrowed.is_contiguous(), "within the array");
        let mut block = [T::default(); BLOCK];
        let mut at = range.start;
        while at < range.end {
            let count = BLOCK.min(range.end - at);
            // SAFETY: `at` is within the array.
            let source = unsafe { self.first.as_ptr().add(at) };
            // SAFETY: `count` elements from there on are too, and are aligned or copied as bytes.
            unsafe {
                source.cast::<u8>().copy_to_nonoverlapping(block.as_mut_ptr().cast(), count * size_of::<T>());
            };
            if !look(&block[..count])? {
                return Ok(());
            }
            at += count;
        }
        Ok(())
    }
}

impl<T: Copy + Default + std::fmt::Debug> Tokens for RawTokens<'_, T>
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

/// An error of a block that begins at `begin`.
#[cold]
fn at_position(error: Error, begin: usize) -> Error {
    if begin == 0 { error } else { error.prefixed(&format!("in the tokens from position {begin} on")) }
}
