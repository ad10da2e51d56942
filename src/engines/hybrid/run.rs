//! The tokens of a node, stored in 32 bits each if all of them fit.

use crate::base::{Result, try_with_capacity};

use super::TokenSource;

/// The number of tokens that are compared at a time: few enough to be still in the first-level cache when the
/// position of a difference is looked for.
pub const BLOCK: usize = 512;

/// Consecutive tokens. The ids of a vocabulary fit 32 bits; engines make up longer ids for images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenRun {
    /// All tokens are below 2**32.
    Narrow(Vec<u32>),
    /// Some token is not below 2**32.
    Wide(Vec<i64>),
}

/// Tokens to compare with.
#[derive(Clone, Copy, Debug)]
pub enum TokenBlock<'a> {
    /// See [`TokenRun::Narrow`].
    Narrow(&'a [u32]),
    /// See [`TokenRun::Wide`].
    Wide(&'a [i64]),
}

/// Returns whether a token of `ours` differs from the one that `theirs` returns for its position.
#[inline]
pub fn differ(ours: &[u32], theirs: impl Fn(usize) -> i64) -> bool {
    const LANES: usize = 32;
    // The lanes do not depend on each other. Without an early exit the compiler compares several tokens at a
    // time.
    let (chunks, remainder) = ours.as_chunks::<LANES>();
    let mut different = 0;
    for (chunk, tokens) in chunks.iter().enumerate() {
        let lanes: [i64; LANES] =
            std::array::from_fn(|lane| theirs(chunk * LANES + lane) ^ i64::from(tokens[lane]));
        different |= lanes.iter().fold(0, |all, lane| all | lane);
    }
    let done = chunks.len() * LANES;
    for (lane, &token) in remainder.iter().enumerate() {
        different |= theirs(done + lane) ^ i64::from(token);
    }
    different != 0
}

impl TokenBlock<'_> {
    /// Returns whether `tokens`, of the same number, are equal.
    #[must_use]
    pub fn equals(&self, tokens: &[i64]) -> bool {
        match self {
            Self::Narrow(ours) => ours.len() == tokens.len() && !differ(ours, |at| tokens[at]),
            Self::Wide(ours) => *ours == tokens,
        }
    }

    /// Returns how many of the first tokens are equal in `tokens`.
    #[must_use]
    pub fn common(&self, tokens: &[i64]) -> usize {
        match self {
            Self::Narrow(ours) => {
                ours.iter().zip(tokens).take_while(|(ours, theirs)| i64::from(**ours) == **theirs).count()
            }
            Self::Wide(ours) => ours.iter().zip(tokens).take_while(|(ours, theirs)| ours == theirs).count(),
        }
    }

    /// Returns the number of tokens.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::Narrow(tokens) => tokens.len(),
            Self::Wide(tokens) => tokens.len(),
        }
    }

    /// Returns whether there are no tokens.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Default for TokenRun {
    fn default() -> Self {
        Self::Narrow(Vec::new())
    }
}

impl TokenRun {
    /// Copies the tokens `at..at + count` of a prompt.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate them.
    pub(super) fn of(prompt: &dyn TokenSource, at: usize, count: usize) -> Result<Self> {
        let mut narrow = try_with_capacity(count)?;
        let mut block = Vec::with_capacity(BLOCK);
        while narrow.len() < count {
            block.clear();
            prompt.read(at + narrow.len(), BLOCK.min(count - narrow.len()), &mut block);
            if block.iter().fold(0, |all, &token| all | token) >> u32::BITS != 0 {
                let mut wide = try_with_capacity(count)?;
                prompt.read(at, count, &mut wide);
                return Ok(Self::Wide(wide));
            }
            let low = |&token: &i64| u32::try_from(token & i64::from(u32::MAX)).expect("32 bits");
            narrow.extend(block.iter().map(low));
        }
        Ok(Self::Narrow(narrow))
    }

    pub(super) const fn len(&self) -> usize {
        match self {
            Self::Narrow(tokens) => tokens.len(),
            Self::Wide(tokens) => tokens.len(),
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the tokens from `at` on, at most `count`.
    pub(super) fn block(&self, at: usize, count: usize) -> TokenBlock<'_> {
        let end = self.len().min(at.saturating_add(count));
        match self {
            Self::Narrow(tokens) => TokenBlock::Narrow(&tokens[at..end]),
            Self::Wide(tokens) => TokenBlock::Wide(&tokens[at..end]),
        }
    }

    /// Returns how many tokens from `at` on equal those of `prompt` from `prompt_at` on.
    pub(super) fn common(&self, at: usize, prompt: &dyn TokenSource, prompt_at: usize) -> usize {
        let count = (self.len() - at).min(prompt.count().saturating_sub(prompt_at));
        let mut done = 0;
        while done < count {
            let block = self.block(at + done, BLOCK.min(count - done));
            let common = prompt.common(prompt_at + done, block);
            done += common;
            if common < block.len() {
                break;
            }
        }
        done
    }

    /// Splits off and returns the tokens before `at`.
    pub(super) fn split_front(&mut self, at: usize) -> Self {
        match self {
            Self::Narrow(tokens) => {
                let back = tokens.split_off(at);
                Self::Narrow(std::mem::replace(tokens, back))
            }
            Self::Wide(tokens) => {
                let back = tokens.split_off(at);
                Self::Wide(std::mem::replace(tokens, back))
            }
        }
    }

    /// Frees the memory that the tokens do not need, if that is more than they do.
    pub(super) fn shrink(&mut self) {
        match self {
            Self::Narrow(tokens) if tokens.capacity() > 2 * tokens.len() => tokens.shrink_to_fit(),
            Self::Wide(tokens) if tokens.capacity() > 2 * tokens.len() => tokens.shrink_to_fit(),
            Self::Narrow(_) | Self::Wide(_) => (),
        }
    }

    pub(super) fn to_vec(&self) -> Vec<i64> {
        match self {
            Self::Narrow(tokens) => tokens.iter().map(|&token| i64::from(token)).collect(),
            Self::Wide(tokens) => tokens.clone(),
        }
    }

    /// Returns the tokens as 32 bits each, of which hashes are made: other tokens may have the same.
    pub(super) fn names(&self) -> Vec<i32> {
        match self {
            Self::Narrow(tokens) => tokens.iter().map(|token| token.cast_signed()).collect(),
            Self::Wide(tokens) => {
                let folded = tokens.iter().map(|token| (token ^ token >> u32::BITS) & i64::from(u32::MAX));
                folded.map(|token| u32::try_from(token).expect("32 bits").cast_signed()).collect()
            }
        }
    }

    /// Copies the first tokens to `out`, as many as it holds.
    pub(super) fn read(&self, out: &mut [i64]) {
        match self {
            Self::Narrow(tokens) => {
                for (out, &token) in out.iter_mut().zip(tokens) {
                    *out = token.into();
                }
            }
            Self::Wide(tokens) => out.copy_from_slice(&tokens[..out.len()]),
        }
    }

    pub(super) const fn bytes(&self) -> usize {
        match self {
            Self::Narrow(tokens) => tokens.capacity() * size_of::<u32>(),
            Self::Wide(tokens) => tokens.capacity() * size_of::<i64>(),
        }
    }
}
