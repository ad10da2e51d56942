use super::*;

unsafe extern "C" {
    safe fn software_order(seed: u64);
    safe fn software_threads(count: u32, found: *mut u32);
}

fn order<const N: usize>(seed: u64) -> [u32; N] {
    let mut found = [0; N];
    software_order(seed);
    software_threads(u32::try_from(N).unwrap_or(0), found.as_mut_ptr());
    found
}

#[test]
fn a_seed_decides_the_order_of_threads() {
    let _fresh = FreshDriver::new();
    assert_eq!(order(0), [4, 3, 2, 1, 0]);
    for seed in 1..50 {
        let found: [u32; 256] = order(seed);
        assert_eq!(found, order(seed));
        assert_ne!(found, order(seed + 1));
        let mut sorted = found;
        sorted.sort_unstable();
        assert!((0..256).eq(sorted));
        assert_eq!((order(seed), order::<2>(seed).iter().sum()), ([0], 1));
    }
    soft_set_seed(1);
}
