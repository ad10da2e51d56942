//! Moves bytes between memory and other places: the tiers below a device, and the files of a store.
//!
//! | for | use |
//! |---|---|
//! | copies in the background, one after the other | [`CopyQueue`] |
//! | waiting for them, step by step | [`Transfer`] |
//! | other work in the background | [`JobThread`] |
//! | the file system of a store | [`Disk`], and [`Folder`] on this machine |
//!
//! Nothing here depends on what the bytes mean or who owns them.

#![forbid(unsafe_code)]

mod copy_queue;
mod disk;
mod folder;
mod job_thread;
mod steps;

pub use copy_queue::{CopyQueue, EarlierCopy};
pub(crate) use disk::AlignedBytes;
pub use disk::{BLOCK, Disk, DiskFile};
pub(crate) use disk::{read_whole, to_u64, write_whole};
pub use folder::{FileCaching, Folder};
pub use job_thread::JobThread;
pub use steps::Transfer;
