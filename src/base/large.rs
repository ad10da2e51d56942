//! Large tables that are read at random, and a process-wide hook for their memory.
//!
//! A binding installs the hook once, for example to ask the system for huge pages. Without one, such a table
//! is a vector like any other.

use std::ops::Range;
use std::sync::OnceLock;

/// Tables from this number of bytes on are large.
const LARGE: usize = 4 << 20;

static HOOK: OnceLock<fn(Range<usize>)> = OnceLock::new();

/// Calls `hook` with the addresses of every large table from now on, before anything is written there. Later
/// installations have no effect.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
/// use kvpool::base::set_large_table_hook;
/// use kvpool::index::{Order, SlotAllocator};
/// static BYTES: AtomicUsize = AtomicUsize::new(0);
/// set_large_table_hook(|addresses| drop(BYTES.fetch_add(addresses.len(), Relaxed)));
/// let slots = SlotAllocator::new(1 << 20, 1, Order::Sorted).unwrap();
/// assert!(BYTES.load(Relaxed).is_multiple_of(4));
/// ```
pub fn set_large_table_hook(hook: fn(addresses: Range<usize>)) {
    let _ = HOOK.set(hook);
}

/// Creates a table of `count` times `value`.
#[must_use]
pub(crate) fn table_of<T: Clone>(count: usize, value: T) -> Vec<T> {
    let mut table: Vec<T> = Vec::with_capacity(count);
    let begin = table.as_ptr().addr();
    let addresses = begin..begin + count * size_of::<T>();
    if addresses.len() >= LARGE
        && let Some(hook) = HOOK.get()
    {
        hook(addresses);
    }
    table.resize(count, value);
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    static ANNOUNCED: Mutex<Vec<Range<usize>>> = Mutex::new(Vec::new());

    #[test]
    fn large_tables_are_announced() {
        set_large_table_hook(|addresses| ANNOUNCED.lock().expect("no panic").push(addresses));
        let [small, large] = [LARGE / 8 - 1, LARGE / 8].map(|count| table_of(count, 7_u64));
        let begin = large.as_ptr().addr();
        assert_eq!(ANNOUNCED.lock().expect("no panic").pop(), Some(begin..begin + LARGE));
        assert!(ANNOUNCED.lock().expect("no panic").is_empty(), "one is small");
        assert!(small.iter().chain(&large).all(|&word| word == 7));
    }
}
