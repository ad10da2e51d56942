//! What a prefix cache keeps: which tokens have pages, who uses them, and what goes first.
//!
//! [`Tree`] maps tokens to pages. It decides which pages are cached, not which are free: their ownership lies
//! with [`index`](crate::index), and [`pool`](crate::pool) moves both together. It knows no address, no
//! device and no clock, and is not synchronised.
//!
//! | for | use |
//! |---|---|
//! | finding, holding, adding and evicting prefixes | [`Tree`], [`Hold`] |
//! | the same by nodes, for engines that hold those | [`NodeHandle`], [`Insertion`] |
//! | what is evicted first | [`Policy`], one small type each |
//! | token ids of a caller, compared where they lie | [`Tokens`] |
//! | users whose prefixes stay apart | [`Namespace`] |
//! | why a prompt is not found | [`Tree::explain`], [`Segment`] |
//! | what came and went | [`Tree::keep_journal`], [`CacheEvent`] |
//! | names of pages for other processes and other tiers | [`KeyChain`], [`PageHash`], [`StoreKeys`] |
//! | what a tier below should get, and what it has | [`Tree::offer`], [`Residency`] |
//! | books that an engine keeps in a shape of its own | [`engines`] |

mod chain;
pub mod engines;
mod journal;
mod keys;
mod namespace;
mod policy;
mod recency_list;
mod residency;
mod tokens;
mod tree;

pub use journal::{CacheEvent, Tier};
pub use keys::{Digest, KeyChain, PageHash, StoreKeys};
pub use namespace::Namespace;
pub use policy::{History, KeyTokens, NodeId, PageKey, Policy, PolicyKind, Remembered, Tick};
pub use recency_list::RecencyList;
pub use residency::{Above, EntryId, Residency};
pub use tokens::Tokens;
#[cfg(feature = "python")]
pub(crate) use tokens::not_a_token;
pub use tree::{
    AGE_BUCKETS, Cause, Continuation, Continues, Evicted, Found, Gone, Hold, Insertion, Location, Lower,
    NodeHandle, NodeInfo, Offered, OfferedPages, OfferedState, Offering, Pressure, Segment, Tree,
    TreePosition, TreeStats,
};
