//! What is kept of finished prompts, and what goes first.
//!
//! Pure bookkeeping on token numbers and index newtypes: no memory, no device, no `unsafe`.

mod policy;

pub use policy::{History, KeyTokens, NodeId, PageKey, Policy, PolicyKind, Remembered, Tick};
