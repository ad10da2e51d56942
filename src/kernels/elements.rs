//! The numbers in a tensor of any dtype.

use half::{bf16, f16};

use crate::base::{DType, Device, Result, try_with_capacity};
use crate::memory::BorrowedTensor;

use super::convert::{E4M3, E5M2, ToF32};
use super::indices::{read, read_indices};

/// The number at an element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Element {
    /// The value of an integer.
    Int(i64),
    /// The value of a float of at most 32 bits.
    Single(f32),
    /// The value of a float64.
    Double(f64),
    /// The value of a boolean.
    Bool(bool),
}

/// Returns the numbers in a tensor in host memory, of any shape and stride, in row-major order.
///
/// # Errors
/// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) when it is not in host memory,
/// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the copy cannot be allocated.
pub(crate) fn elements(tensor: &BorrowedTensor<'_>) -> Result<Vec<Element>> {
    tensor.check_on(Device::Cpu, "the tensor")?;
    match tensor.dtype() {
        DType::F64 => convert_each(tensor, Element::Double),
        DType::F32 => convert_each(tensor, Element::Single),
        DType::F16 => convert_each(tensor, |value: f16| Element::Single(value.to_f32())),
        DType::BF16 => convert_each(tensor, |value: bf16| Element::Single(value.to_f32())),
        DType::F8E4M3 => convert_each(tensor, |value: E4M3| Element::Single(value.to_f32())),
        DType::F8E5M2 => convert_each(tensor, |value: E5M2| Element::Single(value.to_f32())),
        DType::I8 => convert_each(tensor, |value: i8| Element::Int(value.into())),
        DType::U8 => convert_each(tensor, |value: u8| Element::Int(value.into())),
        DType::Bool => convert_each(tensor, |value: u8| Element::Bool(value != 0)),
        _ => Ok(read_indices(tensor)?.iter().map(Element::Int).collect()),
    }
}

/// Returns the elements, whose type is `T`, as numbers.
fn convert_each<T: Copy>(tensor: &BorrowedTensor<'_>, number: impl Fn(T) -> Element) -> Result<Vec<Element>> {
    let values: Vec<T> = read(tensor)?;
    let mut numbers = try_with_capacity(values.len())?;
    numbers.extend(values.into_iter().map(number));
    Ok(numbers)
}
