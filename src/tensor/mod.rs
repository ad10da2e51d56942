//! Descriptions of bytes for other libraries: views that own their memory, and DLPack.
//!
//! Nothing here copies elements, launches work or decides which indices are in use.

pub mod dlpack;
mod view;

pub use view::{DimIndex, TensorView};
