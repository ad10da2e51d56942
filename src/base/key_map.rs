//! Maps by keys that no user writes: numbers of units, and hashes of tokens.

use std::collections::{HashMap, HashSet};

use foldhash::fast::RandomState;

/// A map by such keys. Its hash function is seeded, but not made for keys that an attacker chooses, such as the
/// names of namespaces.
pub(crate) type KeyMap<K, V> = HashMap<K, V, RandomState>;

/// A set of such keys: see [`KeyMap`].
pub(crate) type KeySet<K> = HashSet<K, RandomState>;
