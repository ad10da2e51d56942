//! The bookkeeping of a prefix cache: which tokens have pages, who uses them, and what is evicted first.
//!
//! [`Tree`] maps tokens to pages. It decides which pages are cached. Which pages are free is decided by
//! [`index`](crate::index), and [`pool`](crate::pool) keeps the two consistent. This layer has no addresses,
//! no devices and no clock, and is not synchronised.
//!
//! | for | use |
//! |---|---|
//! | finding, holding, adding and evicting prefixes | [`Tree`], [`Hold`] |
//! | the same for the units of several groups of a layout | [`GroupTree`], [`GroupHold`] |
//! | names of nodes, for trees of engines | [`NodeHandle`] |
//! | the order of eviction | [`Policy`], one small type each |
//! | what a token is worth by its position | [`PrefillCost`] |
//! | requests that wait, for which prefixes are kept | [`Tree::add_waiting`], [`WaitingId`], [`WaitingRank`] |
//! | token ids of a caller, compared in place | [`Tokens`] |
//! | users whose prefixes stay apart | [`Namespace`] |
//! | the reasons for a miss | [`Tree::explain`], [`Segment`] |
//! | changes of a cache | [`Tree::keep_journal`], [`JournalOf`], [`CacheEvent`] |
//! | names of pages for other processes and other tiers | [`KeyChain`], [`PageHash`], [`StoreKeys`] |
//! | pages for a tier below, and the contents of that tier | [`Tree::offer`], [`Residency`] |

#![forbid(unsafe_code)]

mod block_keys;
mod group_tree;
mod journal;
mod keys;
mod namespace;
mod node_arena;
mod page_worth;
mod policy;
mod prefill_cost;
mod rare_cases;
mod recency_list;
mod residency;
mod rolling_hash;
mod sessions;
mod tokens;
mod tree;
mod waiting;

pub(crate) use block_keys::{NewPages, PageAndBlock, Published, record_published, visit_ends_back};
pub use group_tree::{
    CachedPage, GroupExplanation, GroupHold, GroupPublication, GroupReason, GroupTree, JournalOf,
    LeasedUnits, PublicationPlan, Relief, UnitNumbers, UnitsToFree,
};
pub use journal::{CacheEvent, EventGroup, Tier};
pub(crate) use keys::hex;
pub use keys::{Digest, KeyChain, PageHash, StoreKeys};
pub use namespace::Namespace;
pub(crate) use node_arena::NodeArena;
pub use node_arena::NodeHandle;
pub(crate) use page_worth::{PageWorth, PlaceInRun};
pub(crate) use policy::RequestNovelty;
pub use policy::{
    BlockKey, BlockTokens, History, MakePolicy, NodeId, Novelty, Outlook, Policy, PolicyKind, Remembered,
    Tick, Worth,
};
pub use prefill_cost::PrefillCost;
pub(crate) use rare_cases::fingerprint_mask;
#[doc(hidden)]
pub use rare_cases::set_rare_cases_frequent;
pub(crate) use recency_list::RecencyList;
pub use residency::{DevicePresence, EntryId, NamespaceHash, Residency};
pub(crate) use rolling_hash::{RollingHash, RollingHasher};
pub use sessions::SessionId;
pub(crate) use sessions::{Sessions, beside_path};
pub use tokens::Tokens;
#[cfg(feature = "python")]
pub(crate) use tokens::not_a_token_error;
pub(crate) use tree::Edges;
pub use tree::{
    AGE_BUCKETS, Cause, Continuation, Evicted, EvictionRecord, FoundPrefix, Hold, LowerTierContents,
    OfferedPages, OfferedPieces, OfferedState, Pressure, ResumeAt, Segment, SegmentState, Tree, TreeStats,
    UsedRun, WritePolicy,
};
pub(crate) use waiting::WaitingNeeds;
pub use waiting::{WaitingId, WaitingRank};
