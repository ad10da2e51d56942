//! Bookkeeping for engines that decide by themselves when a block is taken, which node is evicted and what is
//! offloaded. The types here move no data.
//!
//! The prefix cache of this crate, [`Tree`](crate::cache::Tree), uses none of these types. They share some building
//! blocks with it, such as the policies of eviction.
//!
//! | for | use | engine |
//! |---|---|---|
//! | blocks: their users, the order of free ones, their hashes | [`BlockTable`], [`EvictionQueue`], [`BlockMap`], [`BlockBytes`], [`last_run`] | vLLM |
//! | offloaded chunks by keys of the engine, which controls the transfers | [`OffloadTable`], [`OffloadOrder`] | vLLM |
//! | nodes with values of several kinds of attention | [`hybrid`] | SGLang |
//! | nodes with slots that the tree owns in an allocator | [`SlotTree`] | pymllm |

#![forbid(unsafe_code)]

mod block_bytes;
mod block_map;
mod block_order;
mod block_table;
mod eviction_queue;
pub mod hybrid;
mod last_run;
mod offload_order;
mod offload_table;
mod slot_tree;

pub use block_bytes::BlockBytes;
pub use block_map::{BlockHash, BlockMap};
pub use block_table::{AfterTurn, BlockTable, HashedBlocks, HashedTokens, NotTaken, TakenBlocks};
pub use eviction_queue::{EvictionQueue, QueueEnd};
pub use last_run::{RunEnds, last_run};
pub use offload_order::{OffloadId, OffloadKey, OffloadOrder, RequestRank};
pub use offload_table::{
    NamedChunk, OffloadChange, OffloadConfig, OffloadCounts, OffloadEvent, OffloadRequest, OffloadStage,
    OffloadTable, OffloadedChunk, StorePlan,
};
pub use slot_tree::{EvictedNodes, Inserted, NodePrefix, SlotNode, SlotTree, SlotTreeConfig, SlotTreeStats};
