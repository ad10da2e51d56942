//! NVIDIA devices through the driver interface.
//!
//! No driver call is made before a device is first requested, so importing kvpool makes none. Every call is
//! checked, and its error names it. The primary context is used, which is PyTorch's. Work is enqueued on the
//! stream that the caller names; nothing waits unless its documentation says so.

mod driver;
mod event;
mod gpu;
mod host_wait;
mod memory;
mod page_lock;
mod parked;
mod probe;

pub use event::Event;
pub(crate) use gpu::Function;
pub use gpu::{CopyDirection, Gpu, SideStream};
pub use host_wait::HostWait;
pub(crate) use page_lock::PageLock;
pub(crate) use parked::release_parked;
