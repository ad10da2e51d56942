//! Pins: prefixes that are not evicted before their time is over.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use crate::cache::{Hold, Namespace};

/// The pins of a cache. A call costs a check of the first that ends, and the pins that it ends.
#[derive(Debug, Default)]
pub(super) struct Pins {
    /// The pins, in the order in which they end.
    by_end: BTreeMap<End, Pin>,
    by_name: HashMap<Arc<Namespace>, BTreeSet<End>>,
    made: u64,
    /// Bytes of the names.
    names: usize,
}

/// The end of a pin, and its number, which makes it unique.
type End = (Instant, u64);

#[derive(Debug)]
struct Pin {
    hold: Hold,
    namespace: Arc<Namespace>,
}

impl Pins {
    pub(super) fn is_empty(&self) -> bool {
        self.by_end.is_empty()
    }

    pub(super) fn insert(&mut self, hold: Hold, until: Instant, namespace: &Namespace) {
        self.made += 1;
        let end = (until, self.made);
        let known = self.by_name.get_key_value(namespace).map(|(name, _)| Arc::clone(name));
        let name = known.unwrap_or_else(|| {
            self.names += bytes_of(namespace);
            Arc::new(namespace.clone())
        });
        self.by_name.entry(Arc::clone(&name)).or_default().insert(end);
        self.by_end.insert(end, Pin { hold, namespace: name });
    }

    /// Removes a pin that is over at `now`.
    pub(super) fn take_ended(&mut self, now: Instant) -> Option<Hold> {
        let first = self.by_end.first_entry().filter(|first| first.key().0 <= now)?;
        let (end, Pin { hold, namespace }) = first.remove_entry();
        if let Some(ends) = self.by_name.get_mut(&namespace) {
            ends.remove(&end);
            if ends.is_empty() {
                self.by_name.remove(&namespace);
                self.names -= bytes_of(&namespace);
            }
        }
        Some(hold)
    }

    /// Removes the pins of a namespace, or all.
    pub(super) fn take(&mut self, namespace: Option<&Namespace>) -> Vec<Hold> {
        let Some(namespace) = namespace else {
            (self.by_name, self.names) = (HashMap::new(), 0);
            return std::mem::take(&mut self.by_end).into_values().map(|pin| pin.hold).collect();
        };
        let Some(ends) = self.by_name.remove(namespace) else { return Vec::new() };
        self.names -= bytes_of(namespace);
        ends.iter().filter_map(|end| self.by_end.remove(end)).map(|pin| pin.hold).collect()
    }

    /// Returns the size of the bookkeeping in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.by_end.len() * (size_of::<(End, Pin)>() + size_of::<End>())
            + self.by_name.capacity() * (size_of::<(Arc<Namespace>, BTreeSet<End>)>() + 1)
            + self.names
    }
}

/// Returns the number of bytes of a name that several pins share.
const fn bytes_of(namespace: &Namespace) -> usize {
    size_of::<Namespace>() + namespace.text_bytes()
}
