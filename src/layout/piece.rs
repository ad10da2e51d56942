//! One unit of all layers in one piece, as tiers, stores and other machines have it.

use std::ops::Range;

use crate::base::{DType, Error, Result, bytes_of};

use super::placement::PlaneRuns;

/// The layout of a piece: for the first layer the unit of the first plane, then of the next, then the next layer.
///
/// ```
/// use kvpool::layout::PieceLayout;
/// let piece = PieceLayout::new(3, &[512, 128]).unwrap();
/// assert_eq!((piece.layer_bytes(), piece.bytes()), (640, 1920));
/// assert_eq!(piece.range(2048, 1, &(1..3)), 2048 + 640..2048 + 1920);
/// assert_eq!(piece.planes(2048, 10)[1].at(2, 4), 4 * 2048 + 2 * 640 + 512);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PieceLayout {
    layers: usize,
    /// Bytes of a unit in one layer, of each plane.
    plane_bytes: Vec<usize>,
    layer_bytes: usize,
    bytes: usize,
}

impl PieceLayout {
    /// The layout of `layers` layers with planes of these bytes a unit.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for more bytes than an address can name.
    pub fn new(layers: usize, plane_bytes: &[usize]) -> Result<Self> {
        let layer_bytes = plane_bytes.iter().try_fold(0usize, |sum, &bytes| sum.checked_add(bytes));
        let layer_bytes = layer_bytes
            .ok_or_else(|| Error::argument(format!("planes of {plane_bytes:?} bytes are too large")))?;
        let bytes = bytes_of("a piece", &[layers, layer_bytes], DType::U8)?;
        Ok(Self { layers, plane_bytes: plane_bytes.to_vec(), layer_bytes, bytes })
    }

    /// Returns the number of layers.
    #[must_use]
    pub const fn layers(&self) -> usize {
        self.layers
    }

    /// Returns the bytes of a unit in one layer, of each plane.
    #[must_use]
    pub fn plane_bytes(&self) -> &[usize] {
        &self.plane_bytes
    }

    /// Returns the bytes of one layer of a piece.
    #[must_use]
    pub const fn layer_bytes(&self) -> usize {
        self.layer_bytes
    }

    /// Returns the bytes of a piece.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the bytes of some layers of the piece of a number, where pieces begin `stride` bytes apart.
    #[must_use]
    pub const fn range(&self, stride: usize, piece: usize, layers: &Range<usize>) -> Range<usize> {
        let begin = piece * stride;
        begin + layers.start * self.layer_bytes..begin + layers.end * self.layer_bytes
    }

    /// Returns where each plane lies in `count` pieces that begin `stride` bytes apart.
    #[must_use]
    pub fn planes(&self, stride: usize, count: usize) -> Vec<PlaneRuns> {
        let mut offset = 0;
        let place = |&unit_bytes: &usize| {
            let begin = offset;
            offset += unit_bytes;
            PlaneRuns {
                offset: begin,
                layers: self.layers,
                layer_step: self.layer_bytes,
                units: count,
                unit_step: stride,
                unit_bytes,
            }
        };
        self.plane_bytes.iter().map(place).collect()
    }
}
