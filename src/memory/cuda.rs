//! NVIDIA devices through the driver interface.
//!
//! No driver call is made before a device is first requested, so importing kvpool makes none. Every call is
//! checked, and its error names it. The primary context is used, which is PyTorch's. Work is enqueued on the
//! stream that the caller names; nothing waits unless its documentation says so.

mod driver;
mod event;
mod gpu;
mod memory;
mod page_lock;
mod parked;
mod probe;
mod ring;

pub use event::{Event, HostWait};
pub(crate) use gpu::Function;
pub(in crate::memory) use gpu::is_forked;
pub use gpu::{CopyDirection, Gpu, SideStream};
pub use memory::{Cuda, PageLockedHost};
pub use page_lock::PageLock;
pub(crate) use parked::release_parked;
pub(crate) use ring::Reply;
pub use ring::Ring;
