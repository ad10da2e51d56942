//! NVIDIA devices through the driver interface.
//!
//! Nothing here runs before somebody asks for a device: importing kvpool makes no driver call. Every call is checked
//! and named in its error, and the primary context is used, which is PyTorch's. Work is enqueued on the stream that
//! the caller names; nothing waits but what says so.

mod driver;
mod event;
mod gpu;
mod memory;
mod page_lock;
mod parked;
mod probe;
mod ring;

pub use event::Event;
pub(in crate::memory) use gpu::is_forked;
pub use gpu::{Function, Gpu};
pub use memory::{Cuda, Pinned};
pub use page_lock::PageLock;
pub use ring::{Reply, Ring};
