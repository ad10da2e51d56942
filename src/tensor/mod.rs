//! Describing bytes to others: views that own their memory, and DLPack.

pub mod dlpack;
mod view;

pub use view::TensorView;
