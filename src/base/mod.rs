//! Types that every other layer uses: indices, dtypes, devices, shapes, errors, and blocking sections.
//!
//! Nothing here owns an index, allocates memory for tensors, or is `unsafe`, except for a hint to the
//! processor.

mod blocking;
pub(crate) mod bounded;
mod device;
mod discarded;
mod dtype;
mod epoch;
mod error;
mod fallible;
mod fork_gate;
mod held;
mod ids;
mod interpreter;
mod key_map;
mod large;
mod life;
pub(crate) mod lock_order;
mod own_thread;
mod prefetch;
mod shape;
pub(crate) mod sync;

pub(crate) use blocking::LONG_COPY;
pub(crate) use blocking::assert_may_wait;
pub use blocking::{
    InterruptCheck, Section, run_blocking, set_blocking_hook, set_interrupt_check, wait_interruptibly,
};
pub use device::Device;
pub(crate) use discarded::Discarded;
pub use dtype::{DType, IndexDType};
pub use epoch::Epoch;
pub use error::{Error, ErrorKind, Facts, Result};
pub(crate) use fallible::{
    check_memory, out_of_memory_error, try_collect, try_collect_each, try_extend, try_push, try_reserve,
    try_to_vec, try_with_capacity, try_zeros,
};
pub use fork_gate::{ForkGate, close_fork_gate, open_fork_gate};
pub(crate) use ids::id;
pub use ids::{
    BlockId, BufferId, ChunkId, EngineSlot, Id, IndexNumber, IndexVec, OffloadSlot, PADDING, Page, PoolPage,
    RequestRow, Slot, StateSlot, widen,
};
pub(crate) use interpreter::unlock_interpreter;
pub use interpreter::{InterpreterLock, set_interpreter_lock};
pub(crate) use key_map::{KeyMap, KeySet};
pub use large::set_large_table_hook;
pub(crate) use large::table_of;
pub(crate) use life::{Life, LifeMark, LifeMarks};
pub(crate) use own_thread::mark_own_thread;
pub(crate) use prefetch::prefetch;
pub(crate) use prefetch::prefetch_line;
pub use shape::{Dims, MAX_NDIM, bytes_of, contiguous_strides};
