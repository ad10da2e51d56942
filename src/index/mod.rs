//! Ownership of integers: slots, pages, rows, buffers and byte ranges.
//!
//! Every index of a space is in exactly one state: free (to be handed out next), released (freed, but kept
//! apart until needed), fenced (freed, but still used by work in flight) or live. The structures here decide
//! which. They have no addresses and no devices, and are not synchronised: protect them with a lock.
//!
//! | for | use |
//! |---|---|
//! | token slots in pages, with groups, fences and shared pages | [`SlotAllocator`] |
//! | rows, and how far each one was written | [`RowTable`] |
//! | tokens and pages of each request | [`Requests`], [`PageList`] |
//! | single indices with a reference count | [`RefCounts`] |
//! | pages and states of several groups in slabs of one size | [`Slabs`] |
//! | units of each request in each of these groups | [`UnitTables`] |
//! | buffers by size class | [`Buckets`] |
//! | byte ranges of memory | [`AddressSpace`] |
//! | a free list or a set of integers to build on | [`FreeList`], [`Bitmap`] |
//!
//! [`Ledgered`] adds a ledger of holders to most of them, for debugging.

#![forbid(unsafe_code)]

mod address_space;
mod bad_frees;
mod bitmap;
mod buckets;
mod extension;
mod free_list;
mod free_times;
mod gaps;
mod ledger;
mod ledgered;
mod mask;
mod moves;
mod owners;
mod page_list;
mod page_size;
mod ref_counts;
mod requests;
mod row_table;
mod runs;
mod slabs;
mod slot_allocator;
mod slot_list;
mod unit_tables;

pub use address_space::AddressSpace;
pub(crate) use bad_frees::on_bad_frees;
pub use bad_frees::{BadFree, BadFrees, OnBadFree};
pub use bitmap::Bitmap;
pub use buckets::{Bucket, Buckets, Reuse, Rounding};
pub use extension::{Extension, LastLoc};
pub use free_list::{Fit, FreeList, Order, Run};
pub use free_times::Moment;
pub use ledger::{Attribution, CallGuard, CallRecord, IndexState, LIFETIME_BUCKETS, Ledger, Owner, Span};
pub use ledgered::Ledgered;
pub use moves::{Move, plan_moves};
pub use page_list::{PageList, Runs};
pub use page_size::PageSize;
pub use ref_counts::{IndexHandle, RefCounts, Returning};
pub(crate) use requests::put_slots_of;
pub use requests::{AbandonedRequest, Growth, GrowthRequest, Requests};
pub use row_table::{RowExtent, RowTable};
pub use runs::{ascending_runs, for_each_run};
pub use slabs::{SlabCounts, SlabUnits, Slabs};
pub use slot_allocator::{FenceId, Held, SlotAllocator, SlotStats};
pub use slot_list::SlotList;
pub use unit_tables::{AdoptedUnits, KeptUnits, MissingUnits, UnitGrowth, UnitRule, UnitTables};
