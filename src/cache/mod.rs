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
//! | what an engine has offloaded by keys of its own, for engines that drive the transfers | [`OffloadTable`], [`OffloadOrder`] |
//! | an engine's blocks: who uses them, in which order free ones go, and which has which hash | [`BlockTable`], [`EvictionQueue`], [`BlockMap`] |
//! | nodes with values of several kinds of attention, driven by an engine | [`hybrid`] |

mod block_map;
mod block_table;
mod chain;
mod eviction_queue;
mod explain;
pub mod hybrid;
mod journal;
mod keys;
mod namespace;
mod offload_order;
mod offload_table;
mod policy;
mod recency_list;
mod residency;
mod tokens;
mod tree;

pub use block_map::{BlockHash, BlockMap};
pub use block_table::{BlockTable, HashedBlocks, HashedTokens, NotTaken, TakenBlocks};
pub use eviction_queue::EvictionQueue;
pub use explain::{Cause, Gone, Pressure, Segment, Whereabouts};
pub use journal::{CacheEvent, Tier};
pub use keys::{Digest, KeyChain, PageHash, StoreKeys};
pub use namespace::Namespace;
pub use offload_order::{OffloadId, OffloadKey, OffloadOrder, RequestRank};
pub use offload_table::{
    NamedChunk, OffloadChange, OffloadConfig, OffloadCounts, OffloadEvent, OffloadRequest, OffloadStage,
    OffloadTable, OffloadedChunk, Storing,
};
pub use policy::{History, KeyTokens, NodeId, PageKey, Policy, PolicyKind, Remembered, Tick};
pub use recency_list::RecencyList;
pub use residency::{EntryId, Residency};
pub use tokens::Tokens;
#[cfg(feature = "python")]
pub(crate) use tokens::not_a_token;
pub use tree::{
    AGE_BUCKETS, Beyond, Continues, Evicted, Found, Hold, Insertion, Lower, NodeHandle, NodeInfo, Offered,
    OfferedPages, OfferedState, Offering, Place, Tree, TreeStats,
};
