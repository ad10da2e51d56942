//! Classes that do the bookkeeping of one engine, for the adapters in `kvpool.integrations`.

pub(super) mod address_space;
pub(super) mod block;
pub(super) mod block_hasher;
pub(super) mod block_map;
pub(super) mod block_queue;
mod hybrid_names;
pub(super) mod hybrid_results;
pub(super) mod hybrid_tree;
pub(super) mod offload;
pub(super) mod slot_tree;
mod turns;
