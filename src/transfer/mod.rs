//! Bytes between memory and other places: the tiers below a device, and the files of a store.
//!
//! | for | use |
//! |---|---|
//! | copies beside their callers, one after the other | [`Lane`] |
//! | waiting for them, step by step | [`Transfer`] |
//! | work beside callers that is no copy | [`JobThread`] |
//! | what a store needs of a file system | [`Disk`], and [`Folder`] on this machine |
//!
//! Nothing here knows what the bytes mean, or which of them are whose.

mod disk;
mod folder;
mod job_thread;
mod lane;
mod steps;

pub(crate) use disk::wide;
pub use disk::{AlignedBytes, BLOCK, Disk, DiskFile, read_whole, write_whole};
pub use folder::{FileCaching, Folder};
pub use job_thread::JobThread;
pub use lane::Lane;
pub use steps::Transfer;
