//! Bytes between memory and other places: the files of a store.
//!
//! A [`Disk`] is what a store needs of a file system, and [`Folder`] that of this machine. Neither knows what the
//! bytes mean, or which of them are whose.

mod disk;
mod folder;

pub(crate) use disk::wide;
pub use disk::{AlignedBytes, BLOCK, Disk, DiskFile, read_whole, write_whole};
pub use folder::Folder;
