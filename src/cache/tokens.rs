//! Token ids of a caller, which are compared without a copy.

use std::fmt;
use std::ops::Range;

use crate::base::{Error, Result, try_reserve, try_with_capacity};

/// Token ids, `0 <= id < 2**31`, of any representation.
///
/// ```
/// use kvpool::cache::Tokens;
/// let prompt: &[i64] = &[5, 6, 7];
/// assert_eq!(prompt.common(1, &[6, 8]).unwrap(), 1);
/// assert_eq!(prompt.slice(1..3, &mut Vec::new()).unwrap(), [6, 7]);
/// assert!([3, -1_i32].as_slice().check(0..2).is_err());
/// ```
pub trait Tokens: fmt::Debug {
    /// Returns the number of tokens.
    fn count(&self) -> usize;

    /// Returns how many tokens from `at` on equal those of `with`, up to the first difference or the end of
    /// either.
    ///
    /// # Errors
    /// Returns an error if an element cannot be read.
    fn common(&self, at: usize, with: &[i32]) -> Result<usize>;

    /// Appends the tokens of `range` to `out`.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a number that is not a token id, and an
    /// error for an element that cannot be read.
    fn read(&self, range: Range<usize>, out: &mut Vec<i32>) -> Result<()>;

    /// Returns the tokens of `range`: a part of the caller's if they are stored alike, or what is read into `buffer`,
    /// whose contents are lost.
    ///
    /// # Errors
    /// See [`Tokens::read`]; also [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory).
    fn slice<'a>(&'a self, range: Range<usize>, buffer: &'a mut Vec<i32>) -> Result<&'a [i32]> {
        buffer.clear();
        try_reserve(buffer, range.len())?;
        self.read(range, buffer)?;
        Ok(buffer)
    }

    /// Checks that the numbers of `range` are token ids.
    ///
    /// # Errors
    /// See [`Tokens::read`].
    fn check(&self, range: Range<usize>) -> Result<()>;
}

/// Returns the error for `number` at `position`, which is not a token id.
#[cold]
pub(crate) fn not_a_token_error(number: i64, position: usize) -> Error {
    Error::argument(format!("token {number} at position {position} is outside [0, 2**31)")).with_index(number)
}

/// The number of tokens that are compared at a time: fast to compare as bytes, and still in the processor's
/// cache if they differ.
const BLOCK: usize = 256;

impl Tokens for &[i32] {
    fn count(&self) -> usize {
        self.len()
    }

    fn common(&self, at: usize, with: &[i32]) -> Result<usize> {
        let tokens = &self[at..];
        let count = tokens.len().min(with.len());
        let (tokens, with) = (&tokens[..count], &with[..count]);
        let mut done = 0;
        for (ours, theirs) in tokens.chunks(BLOCK).zip(with.chunks(BLOCK)) {
            if ours != theirs {
                let equal = ours.iter().zip(theirs).take_while(|(ours, theirs)| ours == theirs).count();
                return Ok(done + equal);
            }
            done += ours.len();
        }
        Ok(done)
    }

    fn read(&self, range: Range<usize>, out: &mut Vec<i32>) -> Result<()> {
        self.check(range.clone())?;
        out.extend_from_slice(&self[range]);
        Ok(())
    }

    fn slice<'a>(&'a self, range: Range<usize>, _buffer: &'a mut Vec<i32>) -> Result<&'a [i32]> {
        self.check(range.clone())?;
        Ok(&self[range])
    }

    fn check(&self, range: Range<usize>) -> Result<()> {
        let tokens = &self[range.clone()];
        if tokens.iter().fold(0, |signs, token| signs | token) >= 0 {
            return Ok(());
        }
        let at = tokens.iter().position(|&token| token < 0).expect("the sign bit of one token is set");
        Err(not_a_token_error(tokens[at].into(), range.start + at))
    }
}

impl Tokens for &[i64] {
    fn count(&self) -> usize {
        self.len()
    }

    fn common(&self, at: usize, with: &[i32]) -> Result<usize> {
        let pairs = self[at..].iter().zip(with);
        Ok(pairs.take_while(|(ours, theirs)| **ours == i64::from(**theirs)).count())
    }

    fn read(&self, range: Range<usize>, out: &mut Vec<i32>) -> Result<()> {
        self.check(range.clone())?;
        let tokens = self[range].iter().map(|&token| i32::try_from(token).expect("checked tokens fit i32"));
        out.extend(tokens);
        Ok(())
    }

    fn check(&self, range: Range<usize>) -> Result<()> {
        let tokens = &self[range.clone()];
        let is_token = |token: &i64| (0..=i64::from(i32::MAX)).contains(token);
        match tokens.iter().position(|token| !is_token(token)) {
            None => Ok(()),
            Some(at) => Err(not_a_token_error(tokens[at], range.start + at)),
        }
    }
}

impl dyn Tokens + '_ {
    /// Returns the tokens of `range`.
    ///
    /// # Errors
    /// See [`Tokens::read`]; also [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory).
    pub fn to_vec(&self, range: Range<usize>) -> Result<Vec<i32>> {
        let mut tokens = try_with_capacity(range.len())?;
        self.read(range, &mut tokens)?;
        Ok(tokens)
    }
}
