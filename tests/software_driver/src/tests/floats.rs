//! 8-bit floats as the kernels make them, beside the division and the rounding that define them.

// The numbers that `params.cuh` gives them.
const E4M3: i32 = 4;
const E5M2: i32 = 5;

unsafe extern "C" {
    safe fn software_divide(value: f32, divisor: f32, reciprocal: f32) -> f32;
    fn software_store_sixteen(dtype: i32, values: *const f32, divisor: f32, reciprocal: f32, bytes: *mut u32);
    safe fn software_store_one(dtype: i32, value: f32) -> u8;
    safe fn software_load(dtype: i32, bits: u8) -> f32;
}

/// Numbers without an order, the same each time.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        u32::try_from((mixed ^ (mixed >> 31)) >> 32).unwrap_or(0)
    }

    /// A float with an exponent of `powers`.
    fn float(&mut self, powers: std::ops::RangeInclusive<i32>) -> f32 {
        let count = u32::try_from(powers.end() - powers.start() + 1).unwrap_or(1);
        let power = powers.start() + i32::try_from(self.bits() % count).unwrap_or(0);
        let exponent = u32::try_from(power + 127).unwrap_or(0);
        f32::from_bits(exponent << 23 | self.bits() >> 9)
    }
}

/// The reciprocal as the launcher computes it.
fn reciprocal(divisor: f32) -> f32 {
    let [least, most] = [-60, 60].map(|power| f32::powi(2.0, power));
    if (least..=most).contains(&divisor) { 1.0 / divisor } else { 0.0 }
}

fn check_sixteen(values: [f32; 16], divisor: f32) {
    for dtype in [E4M3, E5M2] {
        let mut made = [0u32; 4];
        // SAFETY: it reads sixteen values, and writes as many bytes.
        unsafe {
            software_store_sixteen(dtype, values.as_ptr(), divisor, reciprocal(divisor), made.as_mut_ptr());
        }
        // A division keeps what NaNs have as a sign here, as `store_sixteen` does on every device.
        let expected = values.map(|value| software_store_one(dtype, value / divisor));
        let made: Vec<u8> = made.into_iter().flat_map(u32::to_le_bytes).collect();
        assert_eq!(made, expected, "{values:?} / {divisor} as {dtype}");
    }
}

/// `check_sixteen` of any number of values.
fn check_all(values: impl Iterator<Item = f32>, divisor: f32) {
    let values: Vec<f32> = values.collect();
    for chunk in values.chunks(16) {
        let mut sixteen = [0.0; 16];
        sixteen[..chunk.len()].copy_from_slice(chunk);
        check_sixteen(sixteen, divisor);
    }
}

fn scales() -> Vec<f32> {
    let mut random = Random(7);
    let mut scales =
        vec![1.0, 0.5, 2.0, 0.1, 1.0 / 3.0, 3.0, 448.0, 57344.0, 1.0 / 448.0, 0.999_999_94, 1.000_000_1];
    scales.extend([f32::MIN_POSITIVE, f32::from_bits(1), f32::MAX, 1e-30, 1e30]);
    scales.extend([-60, -61, 60, 61].map(|power| f32::powi(2.0, power)));
    scales.extend((0..20).map(|_| random.float(-8..=8)));
    scales.extend((0..12).map(|_| random.float(-64..=64)));
    scales
}

#[test]
fn floats_are_divided_and_rounded_as_defined() {
    let mut random = Random(1);
    for scale in scales() {
        // Every float near a tie, times the scale: there a wrong bit shows.
        for (dtype, beyond) in [(E4M3, 480.0), (E5M2, 65536.0)] {
            let codes = (0..0x80).map(|code| software_load(dtype, code)).filter(|code| code.is_finite());
            let codes: Vec<f32> = codes.chain([beyond]).collect();
            let ties = codes.windows(2).map(|pair| f32::midpoint(pair[0], pair[1]));
            let near = ties.flat_map(|tie| (0..99).map(move |step| (tie * scale).to_bits() + step));
            let near = near.map(|bits| f32::from_bits(bits.saturating_sub(49)));
            check_all(near.flat_map(|value| [value, -value]), scale);
        }
        check_all((0..100_000).map(|_| f32::from_bits(random.bits())), scale);
    }
    for _ in 0..250_000 {
        let divisor = random.float(-70..=70);
        check_sixteen(std::array::from_fn(|_| f32::from_bits(random.bits())), divisor);
        check_sixteen(std::array::from_fn(|_| random.float(-20..=20)), divisor);
    }
}

#[test]
fn quotients_have_every_bit_of_the_division() {
    let check = |value: f32, divisor: f32| {
        let made = software_divide(value, divisor, 1.0 / divisor);
        assert_eq!(made.to_bits(), (value / divisor).to_bits(), "{value:?} / {divisor:?}");
    };
    let mut random = Random(3);
    for _ in 0..20_000_000 {
        check(random.float(-60..=59), random.float(-60..=59));
    }
    // Significands at both ends, where the estimate is farthest off, and those whose reciprocals are.
    let ends = || (0..600).flat_map(|step| [0x3F80_0000 + step, 0x3FFF_FFFF - step]).map(f32::from_bits);
    for value in ends() {
        for divisor in ends() {
            check(value, divisor);
            check(-value, divisor);
            check(value * f32::powi(2.0, -60), divisor * f32::powi(2.0, 59));
        }
    }
    // Every significand, with a few divisors.
    for divisor in
        [0x3FFF_FFFF, 0x3FFF_FFFE, 0x3F80_0001, 0x3FB5_04F3, 0x3FC0_0001, 0x3FAA_AAAB].map(f32::from_bits)
    {
        for significand in 0x3F80_0000..0x4000_0000 {
            check(f32::from_bits(significand), divisor);
        }
    }
    for value in (0..1_000_000).map(|_| f32::from_bits(random.bits())).chain([0.0, -0.0]) {
        if value.is_finite() {
            assert_eq!(software_divide(value, 1.0, 1.0).to_bits(), value.to_bits(), "{value:?}");
        }
    }
    assert_eq!(software_divide(-0.0, 3.0, 1.0 / 3.0).to_bits(), (-0.0f32).to_bits());
    assert_eq!(software_divide(0.0, 3.0, 1.0 / 3.0).to_bits(), 0);
}
