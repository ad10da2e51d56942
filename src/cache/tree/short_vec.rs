//! A vector that is stored inline while it is short: a leaf with few pages needs no allocation. A long one
//! can be shared with its readers.

use std::borrow::Cow;
use std::ops::Deref;
use std::sync::Arc;

/// The number of elements that fit in the place of a `Vec`.
const SHORT: usize = 3;

/// A vector of the size of a `Vec` that needs no allocation for up to three elements.
#[derive(Clone, Debug)]
pub(super) enum ShortVec<T> {
    /// The first `len` of `items`.
    Short { len: u8, items: [T; SHORT] },
    /// Other lengths, and vectors that have become short.
    Long(Vec<T>),
    /// Many elements, which readers may keep as long as they want. They do not change meanwhile.
    Shared(Arc<Vec<T>>),
}

impl<T> ShortVec<T> {
    pub(super) const fn new() -> Self {
        Self::Long(Vec::new())
    }

    /// Returns the capacity of its allocation, in elements; 0 if the elements are inline.
    pub(super) fn heap_capacity(&self) -> usize {
        match self {
            Self::Short { .. } => 0,
            Self::Long(items) => items.capacity(),
            Self::Shared(items) => items.capacity(),
        }
    }
}

impl<T: Copy> ShortVec<T> {
    /// Shares the elements with the caller, if there are at least `min_len` and they are not inline.
    pub(super) fn share(&mut self, min_len: usize) -> Option<Arc<Vec<T>>> {
        match self {
            Self::Long(items) if items.len() >= min_len => {
                let items = Arc::new(std::mem::take(items));
                *self = Self::Shared(Arc::clone(&items));
                Some(items)
            }
            Self::Shared(items) => Some(Arc::clone(items)),
            Self::Short { .. } | Self::Long(_) => None,
        }
    }

    /// Ends the sharing, before a change that keeps the first `len` elements.
    fn unshare(&mut self, len: usize) {
        if let Self::Shared(items) = self {
            let items = std::mem::take(items);
            *self = Self::Long(
                Arc::try_unwrap(items).unwrap_or_else(|items| items[..len.min(items.len())].to_vec()),
            );
        }
    }

    fn of(items: &[T]) -> Self {
        let short = match *items {
            [a] => [a; SHORT],
            [a, b] => [a, b, b],
            [a, b, c] => [a, b, c],
            _ => return Self::Long(items.to_vec()),
        };
        Self::Short {
            len: u8::try_from(items.len()).expect("at most three elements are short"),
            items: short,
        }
    }

    pub(super) fn extend_from_slice(&mut self, more: &[T]) {
        self.unshare(usize::MAX);
        match self {
            Self::Long(items) if !items.is_empty() => items.extend_from_slice(more),
            short => *short = Cow::from([short, more].concat()).into(),
        }
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.unshare(len);
        match self {
            Self::Long(items) => items.truncate(len),
            short => *short = Self::of(&short[..len.min(short.len())]),
        }
    }

    /// Removes the elements from `at` on, and returns them.
    pub(super) fn split_off(&mut self, at: usize) -> Self {
        let back = Self::of(&self[at..]);
        self.truncate(at);
        back
    }

    pub(super) fn shrink_to_fit(&mut self) {
        match self {
            Self::Long(items) if items.len() > SHORT => items.shrink_to_fit(),
            Self::Long(items) => *self = Self::of(items),
            Self::Short { .. } | Self::Shared(_) => (),
        }
    }
}

impl<T: Copy> From<Cow<'_, [T]>> for ShortVec<T> {
    fn from(items: Cow<'_, [T]>) -> Self {
        match items {
            Cow::Owned(items) if items.len() > SHORT => Self::Long(items),
            few => Self::of(&few),
        }
    }
}

impl<T> Default for ShortVec<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Deref for ShortVec<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Short { len, items } => &items[..usize::from(*len)],
            Self::Long(items) => items,
            Self::Shared(items) => items,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_vector_that_it_replaces() {
        assert_eq!(size_of::<ShortVec<u32>>(), size_of::<Vec<u32>>());
        for (len, more, cut) in (0..8).flat_map(|len| (0..8).map(move |more| (len, more, (len * more) % 7))) {
            let mut plain: Vec<u32> = (0..len).collect();
            let mut short = ShortVec::from(Cow::from(plain.clone()));
            let more: Vec<u32> = (100..100 + more).collect();
            plain.extend_from_slice(&more);
            short.extend_from_slice(&more);
            assert_eq!(*short, *plain);
            let at = plain.len().min(usize::try_from(cut).expect("small"));
            let rest = plain.split_off(at);
            assert_eq!((&*short.split_off(at), &*short), (&*rest, &*plain));
            short.shrink_to_fit();
            assert_eq!((&*short, short.heap_capacity() == 0), (&*plain, plain.len() <= SHORT));
            short.truncate(2);
            plain.truncate(2);
            assert_eq!(*short, *plain);
        }
    }

    #[test]
    fn shared_values_do_not_change() {
        const MANY: usize = 4;
        let all: Vec<usize> = (0..2 * MANY).collect();
        for at in [0, 1, MANY, all.len()] {
            for is_kept in [false, true] {
                let mut short = ShortVec::from(Cow::from(all.clone()));
                let shared = short.share(MANY).expect("many").clone();
                assert!(Arc::ptr_eq(&shared, &short.share(MANY).expect("many")));
                let kept = is_kept.then_some(shared);
                let mut other = short.clone();
                other.extend_from_slice(&all[..at]);
                assert_eq!(*other, *[&all[..], &all[..at]].concat());
                assert_eq!((&*short.split_off(at), &*short), (&all[at..], &all[..at]));
                short.extend_from_slice(&all);
                assert_eq!(*short, *[&all[..at], &all[..]].concat());
                assert!(kept.is_none_or(|kept| *kept == all));
            }
        }
        assert!(ShortVec::from(Cow::from(&all[1..MANY])).share(MANY).is_none(), "too few");
    }
}
