//! What a model keeps for its requests, and where the bytes lie: the one place that computes addresses.
//!
//! | for | use |
//! |---|---|
//! | the planes, groups and layers of a model | [`CacheLayout`], [`Group`], [`Plane`] |
//! | where the units of one plane lie, in every layer | [`PlaneRuns`] |
//! | the planes of all layers of a group in memory of its own | [`GroupPlacement`] |
//! | groups that share slabs of one size | [`SlabLayout`], [`SlabGroup`] |
//! | one unit of all layers in one piece, as tiers and stores have it | [`PieceLayout`] |
//!
//! A unit is what a group hands out at once: a page of tokens, or a state. A layout has no memory and no device;
//! all of this is arithmetic, checked once, when a placement is made.

#![forbid(unsafe_code)]

mod cache_layout;
mod piece;
mod placement;
mod slabs;
mod table;

pub use cache_layout::{CacheLayout, Group, GroupKind, Plane, PrefixUnits, Share};
pub use piece::PieceLayout;
pub use placement::{GroupPlacement, PlaneOrder, PlaneRuns};
pub use slabs::{SlabGroup, SlabLayout, SlabOptions};
