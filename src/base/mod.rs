//! Words and numbers that every other layer speaks: indices, dtypes, devices, shapes, errors; and sections that wait.
//!
//! Nothing here allocates memory for tensors, owns an index, or is `unsafe`.

mod blocking;
pub(crate) mod bounded;
mod device;
mod dtype;
mod error;
mod ids;
mod reserve;
mod shape;
pub(crate) mod sync;

pub use blocking::{Section, blocking, on_blocking};
pub use device::Device;
pub use dtype::DType;
pub use error::{Error, ErrorKind, Facts, Result};
pub use ids::{Id, IndexVec, PADDING, Page, RequestRow, Slot, StateSlot, widen};
pub use reserve::{reserve, zeros};
pub use shape::{Dims, MAX_NDIM, bytes_of, contiguous_strides};
