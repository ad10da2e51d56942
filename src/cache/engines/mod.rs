//! What engines keep by books of their own shape, and decide themselves: when a block is taken, which node is
//! evicted, what is offloaded. The types here keep those books and move no page.
//!
//! They share small parts with the prefix cache of this crate, [`Tree`](super::Tree), but it uses none of
//! them.
//!
//! | for | use | engine |
//! |---|---|---|
//! | blocks: who uses them, in which order free ones go, and which has which hash | [`BlockTable`], [`EvictionQueue`], [`BlockMap`] | vLLM |
//! | chunks that are offloaded by keys of the engine, which drives the transfers | [`OffloadTable`], [`OffloadOrder`] | vLLM |
//! | nodes with values of several kinds of attention | [`hybrid`] | SGLang |

mod block_map;
mod block_table;
mod eviction_queue;
pub mod hybrid;
mod offload_order;
mod offload_table;

pub use block_map::{BlockHash, BlockMap};
pub use block_table::{BlockTable, HashedBlocks, HashedTokens, NotTaken, TakenBlocks};
pub use eviction_queue::EvictionQueue;
pub use offload_order::{OffloadId, OffloadKey, OffloadOrder, RequestRank};
pub use offload_table::{
    NamedChunk, OffloadChange, OffloadConfig, OffloadCounts, OffloadEvent, OffloadRequest, OffloadStage,
    OffloadTable, OffloadedChunk, Storing,
};
