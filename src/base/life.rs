//! Marks that tell whether something that was handed out is still alive, without a reference count.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::{Result, try_with_capacity};

/// The life of something that was handed out: dropping it ends the life.
#[derive(Debug)]
pub(crate) struct Life(&'static AtomicBool);

impl Drop for Life {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Tells whether a [`Life`] is over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LifeMark(&'static AtomicBool);

impl LifeMark {
    /// Returns whether the life is over.
    #[must_use]
    pub(crate) fn is_over(self) -> bool {
        !self.0.load(Ordering::Acquire)
    }
}

/// Marks that no record refers to. Some of their lives may not be over.
static UNUSED: Mutex<Vec<LifeMark>> = Mutex::new(Vec::new());

/// A supply of marks. They return to a supply of the process with it, and are used again.
#[derive(Debug, Default)]
pub(crate) struct LifeMarks {
    spare: Vec<LifeMark>,
}

impl LifeMarks {
    /// Makes sure that [`LifeMarks::begin`] can be called once more.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host has no memory for marks.
    #[inline]
    pub(crate) fn reserve(&mut self) -> Result<()> {
        if self.spare.is_empty() { self.refill() } else { Ok(()) }
    }

    #[cold]
    fn refill(&mut self) -> Result<()> {
        /// The number of marks taken or made at once.
        const MANY: usize = 64;
        self.spare = try_with_capacity(MANY)?;
        let mut unused = UNUSED.lock().unwrap_or_else(PoisonError::into_inner);
        let over = unused.extract_if(.., |mark| mark.is_over());
        self.spare.extend(over.take(MANY));
        drop(unused);
        if self.spare.is_empty() {
            let mut made = try_with_capacity(MANY)?;
            made.resize_with(MANY, || AtomicBool::new(false));
            self.spare.extend(made.leak().iter().map(LifeMark));
        }
        Ok(())
    }

    /// Begins a life.
    ///
    /// # Panics
    /// Without a successful [`LifeMarks::reserve`] since the last call.
    #[inline]
    pub(crate) fn begin(&mut self) -> (Life, LifeMark) {
        let mark = self.spare.pop().expect("a mark was reserved");
        mark.0.store(true, Ordering::Relaxed);
        (Life(mark.0), mark)
    }

    /// Takes back a mark, to be used again once its life is over.
    pub(crate) fn reuse(&mut self, mark: LifeMark) {
        if mark.is_over() && self.spare.len() < self.spare.capacity() {
            self.spare.push(mark);
        } else {
            Self::give_up(std::iter::once(mark));
        }
    }

    /// Gives marks to the supply of the process. Their lives need not be over.
    pub(crate) fn give_up(marks: impl IntoIterator<Item = LifeMark>) {
        UNUSED.lock().unwrap_or_else(PoisonError::into_inner).extend(marks);
    }
}

impl Drop for LifeMarks {
    fn drop(&mut self) {
        let spare = std::mem::take(&mut self.spare);
        Self::give_up(spare);
    }
}
