//! The blocks of an engine by hashes that the engine computes. Several blocks may have the same hash, because
//! they hold the same tokens.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::hash::{Hash, Hasher};

use crate::base::KeyMap;

/// The longest hash that needs no allocation: 32 bytes, and a group of layers.
const SHORT: usize = 38;

/// The hash of a block, of any length. Hashes are compared in full.
#[derive(Clone)]
pub struct BlockHash(Bytes);

#[derive(Clone)]
enum Bytes {
    Short { len: u8, bytes: [u8; SHORT] },
    Long(Box<[u8]>),
}

impl BlockHash {
    /// Returns the bytes of the hash.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Bytes::Short { len, bytes } => &bytes[..usize::from(*len)],
            Bytes::Long(bytes) => bytes,
        }
    }
}

impl From<&[u8]> for BlockHash {
    fn from(bytes: &[u8]) -> Self {
        let short = u8::try_from(bytes.len()).ok().filter(|&len| usize::from(len) <= SHORT);
        Self(short.map_or_else(
            || Bytes::Long(bytes.into()),
            |len| {
                let mut kept = [0; SHORT];
                kept[..bytes.len()].copy_from_slice(bytes);
                Bytes::Short { len, bytes: kept }
            },
        ))
    }
}

impl Borrow<[u8]> for BlockHash {
    fn borrow(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl PartialEq for BlockHash {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for BlockHash {}

impl Hash for BlockHash {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash({:02x?})", self.as_bytes())
    }
}

/// The blocks that were given a hash after its first block, in the order of arrival.
#[derive(Debug)]
struct Later<V> {
    by_arrival: BTreeMap<u64, (i64, V)>,
    arrivals: KeyMap<i64, u64>,
}

impl<V> Default for Later<V> {
    fn default() -> Self {
        Self { by_arrival: BTreeMap::new(), arrivals: KeyMap::default() }
    }
}

impl<V> Later<V> {
    fn insert(&mut self, block: i64, value: V) -> Option<V> {
        let next = self.by_arrival.last_key_value().map_or(0, |(arrival, _)| arrival + 1);
        let arrival = *self.arrivals.entry(block).or_insert(next);
        self.by_arrival.insert(arrival, (block, value)).map(|(_, old)| old)
    }

    fn remove(&mut self, block: i64) -> Option<V> {
        self.by_arrival.remove(&self.arrivals.remove(&block)?).map(|(_, value)| value)
    }

    fn pop_first(&mut self) -> Option<(i64, V)> {
        let (_, (block, value)) = self.by_arrival.pop_first()?;
        self.arrivals.remove(&block);
        Some((block, value))
    }
}

/// A map from the hash and the number of a block to a value. Of several blocks with one hash, the first to
/// arrive is found.
///
/// ```
/// use kvpool::engines::{BlockHash, BlockMap};
/// let mut map = BlockMap::default();
/// map.insert(b"hash", 7, "seven");
/// map.insert(b"hash", 3, "three");
/// assert_eq!(map.first(b"hash"), Some(&"seven"));
/// assert_eq!(map.remove(b"hash", 7), Some("seven"));
/// assert_eq!(map.first(b"hash"), Some(&"three"));
/// assert_eq!(map.hashes().map(BlockHash::as_bytes).collect::<Vec<_>>(), [b"hash"]);
/// ```
#[derive(Debug)]
pub struct BlockMap<V> {
    first: KeyMap<BlockHash, (i64, V)>,
    /// The later blocks of each hash that more than one block has.
    later: KeyMap<BlockHash, Later<V>>,
}

impl<V> Default for BlockMap<V> {
    fn default() -> Self {
        Self { first: KeyMap::default(), later: KeyMap::default() }
    }
}

impl<V> BlockMap<V> {
    /// Returns the number of hashes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.first.len()
    }

    /// Returns whether no block has a hash.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.first.is_empty()
    }

    /// Returns the value of the block that has had the hash longest.
    #[must_use]
    pub fn first(&self, hash: &[u8]) -> Option<&V> {
        self.first.get(hash).map(|(_, value)| value)
    }

    /// Returns whether the block has the hash.
    #[must_use]
    pub fn contains(&self, hash: &[u8], block: i64) -> bool {
        self.first.get(hash).is_some_and(|(first, _)| {
            *first == block || self.later.get(hash).is_some_and(|later| later.arrivals.contains_key(&block))
        })
    }

    /// Returns the blocks of a hash with their values, in the order of arrival.
    pub fn blocks(&self, hash: &[u8]) -> impl Iterator<Item = (i64, &V)> {
        let later = self.later.get(hash).into_iter().flat_map(|later| later.by_arrival.values());
        self.first.get(hash).into_iter().chain(later).map(|(block, value)| (*block, value))
    }

    /// Returns the hashes, in no order.
    pub fn hashes(&self) -> impl Iterator<Item = &BlockHash> {
        self.first.keys()
    }

    /// Gives a block a hash with a value, and returns the previous value if it had the hash already.
    pub fn insert(&mut self, hash: &[u8], block: i64, value: V) -> Option<V> {
        match self.first.entry(hash.into()) {
            Entry::Vacant(place) => {
                place.insert((block, value));
                None
            }
            Entry::Occupied(mut place) if place.get().0 == block => Some(place.insert((block, value)).1),
            Entry::Occupied(_) => self.later.entry(hash.into()).or_default().insert(block, value),
        }
    }

    /// Removes a hash from a block, and returns the value.
    pub fn remove(&mut self, hash: &[u8], block: i64) -> Option<V> {
        let Entry::Occupied(mut first) = self.first.entry(hash.into()) else { return None };
        let Some(later) = self.later.get_mut(hash) else {
            return if first.get().0 == block { Some(first.remove().1) } else { None };
        };
        let removed = if first.get().0 == block {
            later.pop_first().map(|next| first.insert(next).1)
        } else {
            later.remove(block)
        };
        if later.arrivals.is_empty() {
            self.later.remove(hash);
        }
        removed
    }

    /// Removes all hashes from all blocks.
    pub fn clear(&mut self) {
        self.first.clear();
        self.later.clear();
    }
}
