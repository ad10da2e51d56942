//! Words and numbers that every other layer speaks: indices, dtypes, devices, shapes, errors; and a lock.
//!
//! Nothing here allocates memory for tensors, owns an index, or is `unsafe`.

mod device;
mod dtype;
mod error;
mod ids;
mod reserve;
mod shape;
pub(crate) mod sync;
mod watched;

pub use device::Device;
pub use dtype::DType;
pub use error::{Error, ErrorKind, Result};
pub use ids::{Id, IndexVec, PADDING, Page, RequestRow, Slot, StateSlot, narrow, widen};
pub use reserve::{reserve, zeros};
pub use shape::{Dims, MAX_NDIM, bytes_of, contiguous_strides};
pub use watched::{Waits, Watched, WatchedGuard};
