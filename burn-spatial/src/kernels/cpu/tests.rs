//! Every kernel, on every instruction set, and every generic body against plain loops in f64.

use std::ops::Range;

use burn_backend::{TensorData, TensorMetadata};
use burn_flex::Flex;

use super::super::{Count, Position, Taps, Window, WindowAxis, generic, inputs, outputs};
use super::*;

/// A small generator: the cases are the same on every run.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }
    fn within(&mut self, lo: usize, hi: usize) -> usize {
        lo + self.next() as usize % (hi - lo + 1)
    }
    fn values(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| f64::from((self.next() % 2048) as f32 / 1024.0 - 1.0)).collect()
    }
}

#[derive(Debug)]
struct Case {
    n: usize,
    cin: usize,
    cout: usize,
    groups: usize,
    window: Window,
}

impl Case {
    fn random(rng: &mut Rng) -> Case {
        let groups = [1, 1, 1, 2, 3][rng.within(0, 4)];
        let common = rng.within(0, 2) == 0;
        let window = [0, 1, 2].map(|axis| {
            let input = rng.within(1, if axis == 2 { 20 } else { 7 });
            let kernel = if common { 3 } else { rng.within(1, 4) };
            WindowAxis {
                input,
                output: rng.within(1, input + 2),
                kernel,
                stride: rng.within(1, if common { 2 } else { 3 }),
                dilation: if common { 1 } else { rng.within(1, 2) },
                offset: rng.within(0, 8) as isize - 4,
            }
        });
        Case { n: rng.within(1, 2), cin: groups * rng.within(1, 5), cout: groups * rng.within(1, 9), groups, window }
    }

    fn weight_shape(&self) -> [usize; 5] {
        let k = self.window.map(|a| a.kernel);
        [self.cout, self.cin / self.groups, k[0], k[1], k[2]]
    }

    /// Calls `f(x, weight, output)` with the flat positions of every product the convolution sums.
    fn products(&self, mut f: impl FnMut(usize, usize, usize)) {
        let (ci, co) = (self.cin / self.groups, self.cout / self.groups);
        let ins: usize = inputs(&self.window).iter().product();
        let outs: usize = outputs(&self.window).iter().product();
        let taps: usize = self.window.iter().map(|a| a.kernel).product();
        for n in 0..self.n {
            for m in 0..self.cout {
                for c in 0..ci {
                    let channel = m / co * ci + c;
                    reads(&self.window, |i, t, o| {
                        f((n * self.cin + channel) * ins + i, (m * ci + c) * taps + t, (n * self.cout + m) * outs + o);
                    });
                }
            }
        }
    }
}

/// Calls `f(input, tap, output)` for every read of a window, in scan order of each output.
fn reads(window: &Window, mut f: impl FnMut(usize, usize, usize)) {
    let [d, h, w] = window;
    for o in 0..d.output * h.output * w.output {
        let os = [o / (h.output * w.output), o / w.output % h.output, o % w.output];
        for t in 0..d.kernel * h.kernel * w.kernel {
            let ts = [t / (h.kernel * w.kernel), t / w.kernel % h.kernel, t % w.kernel];
            let at = [0, 1, 2].map(|i| (os[i] * window[i].stride + ts[i] * window[i].dilation) as isize - window[i].offset);
            if (0..3).all(|i| (0..window[i].input as isize).contains(&at[i])) {
                f((at[0] as usize * h.input + at[1] as usize) * w.input + at[2] as usize, t, o);
            }
        }
    }
}

fn cast<T: Real>(x: &[f64]) -> Vec<T> {
    x.iter().map(|v| T::from_elem(*v)).collect()
}

fn close<T: Real>(got: &[T], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = want.iter().fold(1.0f64, |m, v| m.max(v.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g.elem::<f64>() - w).abs() <= tolerance * scale, "{what}: entry {i} is {g:?}, not {w}");
    }
}

fn flex<T: Real>(x: &[f64], shape: [usize; 5]) -> FlexTensor {
    tensor(cast::<T>(x), shape)
}

fn back(t: FlexTensor) -> Vec<f64> {
    t.into_data().convert::<f64>().to_vec().unwrap()
}

fn check_conv<T: Real>(isa: Isa, case: &Case, rng: &mut Rng, tolerance: f64) {
    let ins: usize = inputs(&case.window).iter().product();
    let outs: usize = outputs(&case.window).iter().product();
    let shape_w = case.weight_shape();
    let x = rng.values(case.n * case.cin * ins);
    let w = rng.values(shape_w.iter().product());
    let b = rng.values(case.cout);
    let g = rng.values(case.n * case.cout * outs);
    let mut y: Vec<f64> = (0..g.len()).map(|i| b[i / outs % case.cout]).collect();
    let (mut gx, mut gw) = (vec![0.0; x.len()], vec![0.0; w.len()]);
    case.products(|i, k, o| {
        y[o] += x[i] * w[k];
        gx[i] += g[o] * w[k];
        gw[k] += g[o] * x[i];
    });
    let own = Conv::new(isa, case.n, [case.cin, case.cout], &case.window, case.groups);
    let (cx, cw, cg) = (cast::<T>(&x), cast::<T>(&w), cast::<T>(&g));
    let what = |part: &str| format!("{part} {isa:?} {case:?}");
    let cb = cast::<T>(&b);
    let boxes = boxes(&cx, inputs(&case.window));
    for slope in [1.0, 0.0, 0.25] {
        let of = |x: &[Slab<'_, T>]| own.forward(Operands { x, weight: &cw, bias: Some(&cb), slope: T::from_elem(slope) });
        let want: Vec<f64> = y.iter().map(|y| if *y < 0.0 { y * slope } else { *y }).collect();
        let got = of(&[own.whole(&cx)]);
        close(&got, &want, tolerance, &what(&format!("conv with slope {slope}")));
        assert!(!own.reads_slabs::<T>() || of(&slabs(&boxes)) == got, "{}", what("boxes"));
    }
    let weight_grad = own.weight_grad(&[own.whole(&cx)], &cg);
    assert!(!own.weight_grad_reads_slabs::<T>() || own.weight_grad(&slabs(&boxes), &cg) == weight_grad, "{}", what("boxes, weight"));
    close(&own.data_grad(&cg, &cw), &gx, tolerance, &what("data"));
    close(&weight_grad, &gw, tolerance, &what("weight"));
    // <conv(x), g> = <x, data_grad(g)> = <w, weight_grad(x, g)>, from the kernels' own values.
    let dot = |a: &[T], b: &[T]| a.iter().zip(b).map(|(a, b)| a.elem::<f64>() * b.elem::<f64>()).sum::<f64>();
    let forward = dot(&own.forward(Operands::product(&[own.whole(&cx)], &cw)), &cg);
    let data = dot(&cx, &own.data_grad(&cg, &cw));
    let weight = dot(&cw, &weight_grad);
    let scale = tolerance * (1.0 + g.len() as f64 * 10.0);
    assert!((forward - data).abs() <= scale && (forward - weight).abs() <= scale, "{forward} {data} {weight} {case:?}");
}

#[test]
fn convolutions_equal_plain_loops() {
    for isa in Isa::available() {
        let mut rng = Rng(1);
        for _ in 0..150 {
            let case = Case::random(&mut rng);
            check_conv::<f32>(isa, &case, &mut rng, 2e-6);
            check_conv::<f64>(isa, &case, &mut rng, 1e-14);
        }
    }
}

#[test]
fn blocks_deeper_than_a_tile_are_summed_up() {
    let axis =
        |input: usize, stride: usize| WindowAxis { input, output: input.div_ceil(stride), kernel: 3, stride, dilation: 1, offset: 1 };
    let cases = [
        Case { n: 1, cin: 40, cout: 37, groups: 1, window: [axis(2, 1), axis(2, 1), axis(2, 1)] },
        Case { n: 2, cin: 23, cout: 18, groups: 1, window: [axis(4, 2), axis(5, 2), axis(6, 2)] },
        Case { n: 1, cin: 2, cout: 5, groups: 1, window: [axis(9, 1), axis(11, 1), axis(30, 1)] },
    ];
    for isa in Isa::available() {
        let mut rng = Rng(2);
        for case in &cases {
            check_conv::<f32>(isa, case, &mut rng, 1e-5);
            check_conv::<f64>(isa, case, &mut rng, 1e-13);
        }
    }
}

/// Rows wide enough for tiles, and enough of them for the gradient of x by the weight turned over.
#[test]
fn wide_volumes_equal_plain_loops() {
    let axis = |input: usize, [kernel, stride, dilation]: [usize; 3], offset: isize| {
        let reach = input as isize + 2 * offset - ((kernel - 1) * dilation) as isize;
        WindowAxis { input, output: reach.unsigned_abs().div_ceil(stride), kernel, stride, dilation, offset }
    };
    let cases = [
        Case { n: 1, cin: 3, cout: 7, groups: 1, window: [axis(9, [3, 1, 1], 1), axis(10, [3, 1, 1], 1), axis(32, [3, 1, 1], 1)] },
        Case { n: 2, cin: 4, cout: 6, groups: 2, window: [axis(7, [3, 1, 2], 2), axis(11, [2, 1, 1], 1), axis(31, [5, 1, 1], 2)] },
        Case { n: 1, cin: 5, cout: 2, groups: 1, window: [axis(13, [1, 1, 1], 0), axis(12, [1, 1, 1], 0), axis(16, [1, 1, 1], 0)] },
        Case { n: 1, cin: 2, cout: 3, groups: 1, window: [axis(12, [3, 2, 1], 1), axis(11, [3, 3, 1], 0), axis(40, [3, 1, 1], 1)] },
        Case { n: 1, cin: 2, cout: 9, groups: 1, window: [axis(20, [3, 1, 1], -1), axis(14, [3, 1, 1], 3), axis(26, [3, 1, 1], -1)] },
        Case { n: 1, cin: 47, cout: 19, groups: 1, window: [axis(5, [3, 1, 1], 1), axis(4, [3, 1, 1], 1), axis(130, [3, 1, 1], 1)] },
        // Windows that are apart: with every voxel read once, with padding and ends that none reads, with gaps.
        Case { n: 2, cin: 6, cout: 8, groups: 2, window: [axis(4, [2, 2, 1], 0), axis(6, [2, 2, 1], 0), axis(64, [2, 2, 1], 0)] },
        Case { n: 1, cin: 19, cout: 5, groups: 1, window: [axis(6, [3, 3, 1], 0), axis(9, [3, 3, 1], 0), axis(48, [3, 3, 1], 0)] },
        Case { n: 1, cin: 3, cout: 9, groups: 1, window: [axis(7, [2, 2, 1], 1), axis(5, [2, 2, 1], 0), axis(63, [2, 2, 1], 1)] },
        Case { n: 1, cin: 2, cout: 3, groups: 1, window: [axis(6, [2, 3, 1], -1), axis(8, [1, 2, 1], 0), axis(60, [2, 3, 1], 2)] },
        // Rows of which elements a stride apart are sorted.
        Case { n: 2, cin: 5, cout: 9, groups: 1, window: [axis(7, [3, 2, 1], 1), axis(6, [3, 2, 1], 1), axis(63, [3, 2, 1], 1)] },
        Case { n: 1, cin: 3, cout: 4, groups: 1, window: [axis(4, [1, 1, 1], 0), axis(5, [3, 2, 1], 1), axis(95, [4, 3, 2], 3)] },
        Case { n: 1, cin: 3, cout: 4, groups: 1, window: [axis(4, [1, 2, 1], 0), axis(5, [1, 2, 1], 0), axis(66, [1, 2, 1], 0)] },
    ];
    for isa in Isa::available() {
        let mut rng = Rng(6);
        for case in &cases {
            check_conv::<f32>(isa, case, &mut rng, 2e-5);
            check_conv::<f64>(isa, case, &mut rng, 1e-13);
        }
    }
}

#[test]
fn parts_have_the_bits_of_the_whole() {
    let axis = |input: usize, [output, kernel, stride]: [usize; 3]| WindowAxis { input, output, kernel, stride, dilation: 1, offset: 1 };
    let windows = [
        [axis(6, [6, 3, 1]), axis(7, [7, 3, 1]), axis(32, [32, 3, 1])],
        [axis(8, [4, 3, 2]), axis(9, [5, 3, 2]), axis(64, [32, 3, 2])],
        [axis(7, [4, 2, 2]), axis(9, [5, 2, 2]), axis(63, [32, 2, 2])],
    ];
    for isa in Isa::available() {
        let mut rng = Rng(9);
        for window in &windows {
            let [ins, outs] = [inputs(window), outputs(window)];
            let (channels, taps) = ([20, 9], window[0].kernel.pow(3));
            let x: Vec<f32> = cast(&rng.values(channels[0] * ins.iter().product::<usize>()));
            let w: Vec<f32> = cast(&rng.values(channels[0] * channels[1] * taps));
            let bias: Vec<f32> = cast(&rng.values(channels[1]));
            let own = Conv::new(isa, 1, channels, window, 1);
            let slab = [own.whole(&x)];
            let operands = Operands { x: &slab, weight: &w, bias: Some(&bias), slope: 0.1 };
            let whole = own.forward(operands);
            let mut out = vec![f32::NAN; whole.len()];
            // Two parts along each axis; those along the width fill whole vectors and a few lanes.
            for part in 0..8 {
                let cut = [2, 3, 29];
                let ranges = [0, 1, 2].map(|i| if part >> i & 1 == 0 { 0..cut[i] } else { cut[i]..outs[i] });
                let of = |i: usize| {
                    let (axis, range) = (window[i], &ranges[i]);
                    WindowAxis { output: range.len(), offset: axis.offset - (range.start * axis.stride) as isize, ..axis }
                };
                let own = Conv::new(isa, 1, channels, &[of(0), of(1), of(2)], 1);
                let place = Place { extents: outs, at: [0, 1, 2].map(|i| ranges[i].start) };
                own.forward_into(operands, uninit(&mut out), place);
            }
            assert!(out == whole, "{isa:?} {window:?}");
        }
    }
}

#[test]
fn slabs_have_the_bits_of_the_block() {
    let axis =
        |input: usize, output: usize| WindowAxis { input, output, kernel: 3, stride: input.div_ceil(output), dilation: 1, offset: 1 };
    let windows = [[axis(6, 6), axis(7, 7), axis(64, 64)], [axis(8, 4), axis(10, 5), axis(128, 64)]];
    for isa in Isa::available() {
        let mut rng = Rng(11);
        for window in &windows {
            let [ins, outs] = [inputs(window), outputs(window)];
            let (samples, channels) = (2, [3, 5]);
            let x: Vec<f32> = cast(&rng.values(samples * channels[0] * ins.iter().product::<usize>()));
            let g: Vec<f32> = cast(&rng.values(samples * channels[1] * outs.iter().product::<usize>()));
            let own = Conv::new(isa, samples, channels, window, 1);
            let boxes = boxes(&x, ins);
            assert!(own.weight_grad_reads_slabs::<f32>() && boxes.len() == 4);
            assert!(own.weight_grad(&slabs(&boxes), &g) == own.weight_grad(&[own.whole(&x)], &g), "{isa:?} {window:?}");
        }
    }
}

#[test]
fn results_do_not_depend_on_threads() {
    let mut rng = Rng(3);
    let axis = |input: usize| WindowAxis { input, output: input, kernel: 3, stride: 1, dilation: 1, offset: 1 };
    let strided = |output: usize, kernel: usize| WindowAxis { input: 2 * output, output, kernel, stride: 2, dilation: 1, offset: 0 };
    let windows = [
        [axis(2); 3],
        [axis(7), axis(9), axis(26)],
        [strided(6, 3), strided(5, 3), strided(32, 3)],
        [strided(6, 2), strided(5, 2), strided(32, 2)],
        [strided(6, 2), strided(5, 2), strided(9, 2)],
    ];
    for window in windows {
        let [ins, outs] = [inputs(&window), outputs(&window)].map(|e| e.iter().product::<usize>());
        let x: Vec<f32> = cast(&rng.values(12 * ins));
        let g: Vec<f32> = cast(&rng.values(40 * outs));
        let w: Vec<f32> = cast(&rng.values(40 * 12 * window[0].kernel.pow(3)));
        let run = |threads: usize| {
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
                let own = Conv::new(Isa::get(), 1, [12, 40], &window, 1);
                [own.forward(Operands::product(&[own.whole(&x)], &w)), own.data_grad(&g, &w), own.weight_grad(&[own.whole(&x)], &g)]
            })
        };
        let one = run(1);
        for threads in [2, 5] {
            assert!(one == run(threads), "other bits on {threads} threads: {window:?}");
        }
    }
}

#[test]
fn generic_convolutions_equal_the_kernels() {
    let mut rng = Rng(4);
    for _ in 0..40 {
        let case = Case::random(&mut rng);
        let [ins, outs] = [inputs(&case.window), outputs(&case.window)].map(|e| e.iter().product::<usize>());
        let x = flex::<f64>(&rng.values(case.n * case.cin * ins), with_extents_of(&case, true));
        let g = flex::<f64>(&rng.values(case.n * case.cout * outs), with_extents_of(&case, false));
        let w = flex::<f64>(&rng.values(case.weight_shape().iter().product()), case.weight_shape());
        let bias = FlexTensor::from_data(TensorData::new(rng.values(case.cout), [case.cout]));
        let (win, groups) = (&case.window, case.groups);
        let pairs = [
            (
                super::super::conv3d::<Flex>(x.clone(), w.clone(), Some(bias.clone()), win, groups),
                generic::conv3d::<Flex>(x.clone(), w.clone(), Some(bias.clone()), 1.0, win, groups),
            ),
            (
                super::super::activated_conv3d::<Flex>(x.clone(), w.clone(), None, 0.25, win, groups),
                generic::conv3d::<Flex>(x.clone(), w.clone(), None, 0.25, win, groups),
            ),
            (
                super::super::activated_conv3d::<Flex>(x.clone(), w.clone(), Some(bias.clone()), 0.0, win, groups),
                generic::conv3d::<Flex>(x.clone(), w.clone(), Some(bias), 0.0, win, groups),
            ),
            (
                super::super::conv3d_data_grad::<Flex>(g.clone(), w.clone(), win, groups),
                generic::conv3d_data_grad::<Flex>(g.clone(), w, win, groups),
            ),
            (
                super::super::conv3d_weight_grad::<Flex>(x.clone(), g.clone(), case.weight_shape(), win, groups),
                generic::conv3d_weight_grad::<Flex>(x, g, case.weight_shape(), win, groups),
            ),
        ];
        for (own, generic) in pairs {
            assert_eq!(own.shape(), generic.shape(), "{case:?}");
            close(&back(own), &back(generic), 1e-13, &format!("{case:?}"));
        }
    }
}

fn with_extents_of(case: &Case, input: bool) -> [usize; 5] {
    let [d, h, w] = if input { inputs(&case.window) } else { outputs(&case.window) };
    [case.n, if input { case.cin } else { case.cout }, d, h, w]
}

/// The block's place in its volume: some voxels around it on each side.
fn placed(rng: &mut Rng, window: &Window) -> ([isize; 3], [usize; 3]) {
    let origin = [0, 1, 2].map(|_| rng.within(0, 3));
    let volume = [0, 1, 2].map(|i| origin[i] + window[i].input + rng.within(0, 3));
    (origin.map(|o| o as isize), volume)
}

/// x cut in two boxes along the depth, one of these along the height, and a part of that along the width, where there is
/// something to cut.
fn boxes<T: Real>(x: &[T], [d, h, w]: [usize; 3]) -> Vec<([Range<usize>; 3], Vec<T>)> {
    let (plane, row, column) = (d / 2, h / 2, w / 3);
    let all = [[0..plane, 0..h, 0..w], [plane..d, 0..row, 0..w], [plane..d, row..h, 0..column], [plane..d, row..h, column..w]];
    let values = |[planes, rows, columns]: &[Range<usize>; 3]| {
        let lines =
            x.chunks_exact(d * h * w).flat_map(|x| planes.clone().flat_map(move |d| rows.clone().map(move |h_at| (x, d * h + h_at))));
        lines.flat_map(|(x, line)| x[line * w..][columns.clone()].to_vec()).collect()
    };
    all.into_iter().filter(|at| at.iter().all(|range| !range.is_empty())).map(|at| (at.clone(), values(&at))).collect()
}

fn slabs<T: Real>(boxes: &[([Range<usize>; 3], Vec<T>)]) -> Vec<Slab<'_, T>> {
    boxes.iter().map(|(at, values)| Slab { at: at.clone(), values }).collect()
}

/// What `write` writes into a part of larger volumes, of which nothing else may change.
fn in_volumes<T: Real + PartialEq>(window: &Window, planes: usize, rest: T, write: impl FnOnce(&mut [T], Place)) -> Vec<T> {
    let (each, at) = (outputs(window), [1, 2, 1]);
    let extents = [each[0] + 2, each[1] + 2, each[2] + 3];
    let mut out = vec![rest; planes * extents.iter().product::<usize>()];
    write(&mut out, Place { extents, at });
    let mut inside = Vec::new();
    for (i, value) in out.into_iter().enumerate() {
        let position = [i / (extents[1] * extents[2]) % extents[0], i / extents[2] % extents[1], i % extents[2]];
        match (0..3).all(|k| (at[k]..at[k] + each[k]).contains(&position[k])) {
            true => inside.push(value),
            false => assert!(value == rest, "written beside the box"),
        }
    }
    inside
}

fn uninit<T>(values: &mut [T]) -> &mut [std::mem::MaybeUninit<T>] {
    // SAFETY: the kernels write values only.
    unsafe { &mut *(std::ptr::from_mut(values) as *mut [std::mem::MaybeUninit<T>]) }
}

fn maxima<T: Real + PartialEq>(isa: Isa, x: &[T], window: &Window, origin: [isize; 3], volume: [usize; 3]) -> (Vec<T>, Vec<i64>) {
    let (boxes, planes) = (boxes(x, inputs(window)), x.len() / inputs(window).iter().product::<usize>());
    let mut at = Vec::new();
    let best = in_volumes(window, planes, T::default(), |out, place| {
        at = vec![-7; out.len()];
        max(isa, &slabs(&boxes), window, origin, volume, uninit(out), uninit(&mut at), place);
    });
    let at = at.into_iter().filter(|at| *at != -7).collect();
    (best, at)
}

fn means<T: Real + PartialEq>(isa: Isa, x: &[T], window: &Window, count: Count) -> Vec<T> {
    let (boxes, planes) = (boxes(x, inputs(window)), x.len() / inputs(window).iter().product::<usize>());
    in_volumes(window, planes, T::NEG_INFINITY, |out, place| average(isa, &slabs(&boxes), window, count, uninit(out), place))
}

#[test]
fn pools_equal_plain_loops() {
    let mut rng = Rng(5);
    for round in 0..200 {
        let case = Case { groups: 1, ..Case::random(&mut rng) };
        let window = case.window;
        let (origin, volume) = placed(&mut rng, &window);
        let [ins, outs] = [inputs(&window), outputs(&window)].map(|e| e.iter().product::<usize>());
        let planes = case.n * case.cin;
        let mut x = rng.values(planes * ins);
        if round % 2 == 0 {
            // Ties, NaN and minus infinity.
            x.iter_mut().for_each(|v| *v = (*v * 2.0).round());
            (0..x.len() / 20).for_each(|_| {
                let i = rng.within(0, x.len() - 1);
                x[i] = [f64::NAN, f64::NEG_INFINITY][i % 2];
            });
        }
        let g = rng.values(planes * outs);
        let (mut best, mut at) = (vec![f64::NEG_INFINITY; planes * outs], vec![-1i64; planes * outs]);
        let mut from = vec![usize::MAX; planes * outs];
        let (mut sum, mut inside) = (vec![0.0; planes * outs], vec![0usize; outs]);
        reads(&window, |_, _, o| inside[o] += 1);
        // The padding ends one voxel behind the block; what is beyond does not count.
        let padded = Count::Padded(inputs(&window).map(|n| n as isize + 1));
        let wider = window.map(|a| WindowAxis { input: a.input + 1, ..a });
        let before = |o: usize| {
            let [_, h, w] = outputs(&window);
            [o / (h * w), o / w % h, o % w]
                .iter()
                .zip(&wider)
                .map(|(o, axis)| {
                    (0..axis.kernel)
                        .filter(|t| ((o * axis.stride + t * axis.dilation) as isize) < axis.input as isize + axis.offset)
                        .count()
                })
                .product::<usize>()
        };
        let divisor = |o: usize, count: Count| match count {
            Count::Inside => inside[o % outs].max(1) as f64,
            Count::Fixed(divisor) => divisor as f64,
            _ => before(o % outs).max(1) as f64,
        };
        let [_, h, w] = inputs(&window);
        let [mut spread, mut spread_inside, mut spread_fixed] = [0; 3].map(|_| vec![0.0; planes * ins]);
        let fixed = Count::Fixed(rng.within(1, 9));
        for p in 0..planes {
            reads(&window, |i, _, o| {
                let (value, o) = (x[p * ins + i], p * outs + o);
                sum[o] += value;
                spread[p * ins + i] += g[o] / divisor(o, padded);
                spread_inside[p * ins + i] += g[o] / divisor(o, Count::Inside);
                spread_fixed[p * ins + i] += g[o] / divisor(o, fixed);
                if from[o] == usize::MAX || value > best[o] || (value.is_nan() && !best[o].is_nan()) {
                    best[o] = value;
                    from[o] = p * ins + i;
                    let z = [i / (h * w), i / w % h, i % w].map(|v| v as isize);
                    let v = [0, 1, 2].map(|k| (z[k] + origin[k]) as i64);
                    at[o] = (v[0] * volume[1] as i64 + v[1]) * volume[2] as i64 + v[2];
                }
            });
        }
        let mut gx = vec![0.0; planes * ins];
        g.iter().zip(&from).filter(|(_, i)| **i != usize::MAX).for_each(|(g, i)| gx[*i] += g);

        let xt = flex::<f64>(&x, with_extents_of(&case, true));
        let gt = flex::<f64>(&g, {
            let [d, h, w] = outputs(&window);
            [case.n, case.cin, d, h, w]
        });
        let bits = |v: Vec<f64>| v.into_iter().map(|v| if v.is_nan() { None } else { Some(v) }).collect::<Vec<_>>();
        for (values, indices) in [
            super::super::max_pool3d::<Flex>(xt.clone(), &window, origin, volume),
            generic::max_pool3d::<Flex>(xt.clone(), &window, origin, volume),
        ] {
            assert_eq!(bits(back(values)), bits(best.clone()), "{case:?}");
            assert_eq!(indices.clone().into_data().to_vec::<i64>().unwrap(), at, "{case:?}");
            for grad in [
                super::super::max_pool3d_grad::<Flex>(gt.clone(), indices.clone(), &window, origin, volume),
                generic::max_pool3d_grad::<Flex>(gt.clone(), indices, &window, origin, volume),
            ] {
                close(&back(grad), &gx, 1e-14, "max grad");
            }
        }
        for isa in Isa::available() {
            let (values, positions) = maxima::<f64>(isa, &x, &window, origin, volume);
            assert_eq!((bits(values), positions), (bits(best.clone()), at.clone()), "{isa:?} {case:?}");
            let (values, positions) = maxima::<f32>(isa, &cast(&x), &window, origin, volume);
            let values = values.iter().map(|v| f64::from(*v)).collect();
            assert_eq!((bits(values), positions), (bits(best.clone()), at.clone()), "{isa:?} {case:?}");
        }

        if round % 2 == 1 {
            for (count, spread) in [(padded, &spread), (Count::Inside, &spread_inside), (fixed, &spread_fixed)] {
                let mean: Vec<f64> = sum.iter().enumerate().map(|(o, s)| s / divisor(o, count)).collect();
                close(&back(super::super::avg_pool3d::<Flex>(xt.clone(), &window, count)), &mean, 1e-14, "average");
                close(&back(generic::avg_pool3d::<Flex>(xt.clone(), &window, count)), &mean, 1e-14, "generic average");
                for isa in Isa::available() {
                    let what = format!("{isa:?} {case:?}");
                    close(&means::<f64>(isa, &x, &window, count), &mean, 1e-14, &what);
                    close(&means::<f32>(isa, &cast(&x), &window, count), &mean, 1e-6, &what);
                    close(&average_grad::<f64>(isa, &g, &window, count), spread, 1e-14, &what);
                    close(&average_grad::<f32>(isa, &cast(&g), &window, count), spread, 1e-6, &what);
                }
                close(&back(super::super::avg_pool3d_grad::<Flex>(gt.clone(), &window, count)), spread, 1e-14, "average grad");
                close(&back(generic::avg_pool3d_grad::<Flex>(gt.clone(), &window, count)), spread, 1e-14, "generic average grad");
            }
        }
    }
}

/// Channels in two samples, with planes that whole blocks and vectors cover and others, and a slope that makes the
/// activation a ReLU and others: against plain loops, and one instruction set against the other to the bit.
#[test]
fn norms_equal_plain_loops() {
    let mut rng = Rng(8);
    for plane in [1, 16, 100, 1024, 2500] {
        for slope in [0.0, 0.25, 1.0] {
            let channels = 3;
            let [x, g] = [0; 2].map(|_| rng.values(2 * channels * plane));
            let [mean, scale, shift, a, b] = [0; 5].map(|_| rng.values(channels));
            let of = |i: usize| i / plane % channels;
            let before = |i: usize| (x[i] - mean[of(i)]) * scale[of(i)] + shift[of(i)];
            let back = |i: usize| if before(i) < 0.0 { g[i] * slope } else { g[i] };
            let y: Vec<f64> = (0..x.len()).map(|i| if before(i) < 0.0 { before(i) * slope } else { before(i) }).collect();
            let gx: Vec<f64> = (0..x.len()).map(|i| scale[of(i)] * (back(i) - a[of(i)] - (x[i] - mean[of(i)]) * b[of(i)])).collect();
            let total = |f: &dyn Fn(usize) -> f64| -> Vec<f64> {
                (0..channels).map(|c| (0..x.len()).filter(|i| of(*i) == c).map(f).sum()).collect()
            };
            let (sum, dot) = (total(&back), total(&|i| back(i) * (x[i] - mean[of(i)])));
            let middle: Vec<f64> = total(&|i| x[i]).iter().map(|s| s / (2 * plane) as f64).collect();
            let m2 = total(&|i| (x[i] - middle[of(i)]).powi(2));

            fn check<T: Real>(inputs: [&[f64]; 7], plane: usize, slope: f64, wants: [&[f64]; 6], tolerance: f64) {
                let [x, g, mean, scale, shift, a, b] = inputs.map(cast::<T>);
                let all = Isa::available().map(|isa| {
                    let channels = norm::Channels { mean: &mean, scale: &scale, shift: &shift, slope: T::from_elem(slope) };
                    let (middle, m2) = norm::moments(isa, &x, mean.len(), plane);
                    let (sum, dot) = norm::grad_sums(isa, &x, &g, plane, channels);
                    let y = norm::norm(isa, &x, plane, channels);
                    let mut gx = g.clone();
                    norm::grad(isa, &x, &mut gx, plane, channels, &a, &b);
                    [middle, m2, y, sum, dot, gx]
                });
                let all: Vec<[Vec<T>; 6]> = all.collect();
                for (got, want) in all[0].iter().zip(wants) {
                    close(got, want, tolerance, &format!("plane {plane}, slope {slope}"));
                }
                assert!(all.iter().all(|other| *other == all[0]), "plane {plane}, slope {slope}: instruction sets differ");
            }
            let inputs = [&x, &g, &mean, &scale, &shift, &a, &b].map(Vec::as_slice);
            let wants = [&middle, &m2, &y, &sum, &dot, &gx].map(Vec::as_slice);
            check::<f32>(inputs, plane, slope, wants, 2e-6);
            check::<f64>(inputs, plane, slope, wants, 1e-14);
        }
    }
}

/// One tap of weight 1 in rows that whole vectors cover and others: every value, zeros, infinities and NaN too, is activated
/// as by Burn's modules, and so is its gradient.
#[test]
fn activations_equal_burns() {
    use burn_backend::ops::{ActivationOps, FloatTensorOps};
    fn check<T: Real>(width: usize, slope: f64, rng: &mut Rng) {
        let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0];
        let mut x = rng.values(3 * width);
        x.iter_mut().step_by(7).zip(special).for_each(|(x, special)| *x = special);
        let g = rng.values(x.len());
        let shape = [1, 1, 1, 3, width];
        let relu = |t| match slope {
            1.0 => t,
            0.0 => Flex::relu(t),
            slope => Flex::leaky_relu(t, slope.into()),
        };
        // Flex's ReLU makes NaN 0, unlike Burn's own body and its leaky ReLU.
        let want: Vec<f64> = back(relu(flex::<T>(&x, shape))).iter().zip(&x).map(|(y, x)| if x.is_nan() { *x } else { *y }).collect();
        let negative = |x: f64| x < 0.0 || slope == 0.0 && x == 0.0;
        let want_grad: Vec<f64> = x.iter().zip(&g).map(|(x, g)| if negative(*x) { g * slope } else { *g }).collect();
        let same = |got: &[f64], want: &[f64], what: &str| {
            let equal = got.iter().zip(want).all(|(a, b)| a == b || a.is_nan() && b.is_nan());
            assert!(got.len() == want.len() && equal, "{what}, slope {slope}, width {width}: {got:?} for {want:?}");
        };
        let f64s = |values: &[T]| -> Vec<f64> { values.iter().map(|v| v.elem()).collect() };
        let axis = |n: usize| WindowAxis { input: n, output: n, kernel: 1, stride: 1, dilation: 1, offset: 0 };
        for isa in Isa::available() {
            let (cx, one, slope) = (cast::<T>(&x), [T::from_elem(1.0)], T::from_elem(slope));
            let own = Conv::new(isa, 1, [1, 1], &[axis(1), axis(3), axis(width)], 1);
            let y = own.forward(Operands { x: &[own.whole(&cx)], weight: &one, bias: None, slope });
            same(&f64s(&y), &want, &format!("{isa:?}"));
            let mut grad = cast::<T>(&g);
            activation_grad(isa, &y, &mut grad, slope);
            same(&f64s(&grad), &want_grad, &format!("gradient on {isa:?}"));
        }
        let y = flex::<T>(&want, shape);
        let generic = generic::activation_grad::<Flex>(y.clone(), flex::<T>(&g, shape), slope);
        same(&back(generic), &want_grad, "generic gradient");
        // A gradient that something else holds stays as it is; one of its own is turned in its place.
        let grad = flex::<T>(&g, shape);
        same(&back(super::super::activation_grad::<Flex>(y.clone(), grad.clone(), slope)), &want_grad, "gradient");
        same(&back(grad.clone()), &g, "the gradient before");
        let place = slice::<T>(&grad).as_ptr();
        let turned = super::super::activation_grad::<Flex>(y.clone(), grad, slope);
        assert_eq!(slice::<T>(&turned).as_ptr(), place);
        let half = |t| Flex::float_cast(t, burn_backend::FloatDType::BF16);
        let low = super::super::activation_grad::<Flex>(half(y), half(flex::<T>(&g, shape)), slope);
        close(&back(low), &want_grad, 0.01, "bf16");
    }
    let mut rng = Rng(12);
    for width in [13, 33, 64, 6000] {
        for slope in [0.0, 0.25, 1.0, 2.0] {
            check::<f32>(width, slope, &mut rng);
            check::<f64>(width, slope, &mut rng);
        }
    }
}

#[test]
fn views_and_half_precision_are_read_right() {
    let mut rng = Rng(6);
    let axis = WindowAxis { input: 4, output: 4, kernel: 3, stride: 1, dilation: 1, offset: 1 };
    let x = flex::<f32>(&rng.values(2 * 3 * 64), [3, 2, 4, 4, 4]).transpose(0, 1);
    let w = flex::<f32>(&rng.values(5 * 3 * 27), [5, 3, 3, 3, 3]);
    let y = super::super::conv3d::<Flex>(x.clone(), w.clone(), None, &[axis; 3], 1);
    let flat = super::super::conv3d::<Flex>(x.to_contiguous(), w.clone(), None, &[axis; 3], 1);
    let y = back(y);
    assert_eq!(y, back(flat));
    let half = |t| <Flex as burn_backend::ops::FloatTensorOps<Flex>>::float_cast(t, burn_backend::FloatDType::BF16);
    let low = super::super::conv3d::<Flex>(half(x.to_contiguous()), half(w), None, &[axis; 3], 1);
    assert_eq!(low.dtype(), burn_backend::DType::BF16);
    close(&back(low), &y, 0.02, "bf16");
}

#[test]
fn resampling_equals_plain_loops_and_has_its_adjoint() {
    let mut rng = Rng(7);
    for _ in 0..60 {
        let ins = [0, 1, 2].map(|_| rng.within(1, 6));
        let outs = [0, 1, 2].map(|_| rng.within(1, 9));
        let taps: [Taps; 3] = std::array::from_fn(|i| match rng.within(0, 3) {
            0 => Taps::nearest(ins[i], outs[i], ins[i] as f64 / outs[i] as f64),
            1 => Taps::linear(ins[i], outs[i], Position::new(ins[i], outs[i], ins[i] as f64 / outs[i] as f64, rng.within(0, 1) == 1)),
            2 => Taps::mean(ins[i], outs[i]),
            _ => Taps::cubic(ins[i], outs[i], Position::new(ins[i], outs[i], ins[i] as f64 / outs[i] as f64, false)),
        });
        let planes = 4;
        let (x, g) = (rng.values(planes * ins.iter().product::<usize>()), rng.values(planes * outs.iter().product::<usize>()));
        let (mut y, mut gx) = (vec![0.0; g.len()], vec![0.0; x.len()]);
        for p in 0..planes {
            for (zi, zw) in taps[0].rows() {
                for (yi, yw) in taps[1].rows() {
                    for (xi, xw) in taps[2].rows() {
                        for o in 0..outs.iter().product() {
                            let [a, b, c] = [o / (outs[1] * outs[2]), o / outs[2] % outs[1], o % outs[2]];
                            let at = ((p * ins[0] + zi[a]) * ins[1] + yi[b]) * ins[2] + xi[c];
                            let (o, w) = (p * outs.iter().product::<usize>() + o, zw[a] * yw[b] * xw[c]);
                            y[o] += w * x[at];
                            gx[at] += w * g[o];
                        }
                    }
                }
            }
        }
        let xt = flex::<f64>(&x, [2, 2, ins[0], ins[1], ins[2]]);
        let gt = flex::<f64>(&g, [2, 2, outs[0], outs[1], outs[2]]);
        close(&back(super::super::resample::<Flex>(xt.clone(), &taps)), &y, 1e-13, "resample");
        close(&back(super::super::resample_grad::<Flex>(gt.clone(), &taps)), &gx, 1e-13, "resample grad");
        let forward = (0..3).fold(xt, |t, i| generic::resample::<Flex>(t, i, &taps[i]));
        close(&back(forward), &y, 1e-13, "generic resample");
        let backward = (0..3).fold(gt, |t, i| generic::resample_grad::<Flex>(t, i, &taps[i]));
        close(&back(backward), &gx, 1e-13, "generic resample grad");
    }
}

/// Kernels read what a window says: tensors of other shapes are refused, in release as well.
#[test]
fn shapes_that_do_not_fit_are_refused() {
    use super::super::{avg_pool3d_grad, conv3d, conv3d_data_grad, conv3d_weight_grad, max_pool3d};
    let axis = |kernel: usize| WindowAxis { input: 6, output: 7 - kernel, kernel, stride: 1, dilation: 1, offset: 0 };
    let (three, five) = ([axis(3); 3], [axis(5); 3]);
    let zeros = |shape: [usize; 5]| flex::<f32>(&vec![0.0; shape.iter().product()], shape);
    let (x, weight) = (|| zeros([1, 2, 6, 6, 6]), || zeros([4, 2, 3, 3, 3]));
    type F = burn_flex::Flex;
    let refused = |what: &str, call: &dyn Fn() -> FlexTensor| {
        let cause = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).expect_err(what);
        let text = cause.downcast_ref::<String>().map(String::as_str).unwrap_or_default();
        assert!(text.contains(what), "{text:?} does not say {what}");
    };
    refused("the weight", &|| conv3d::<F>(x(), weight(), None, &five, 1));
    refused("in 3 groups", &|| conv3d::<F>(x(), weight(), None, &three, 3));
    refused("a box", &|| conv3d::<F>(zeros([1, 2, 6, 6, 5]), weight(), None, &five.map(|a| WindowAxis { input: 5, ..a }), 1));
    refused("the gradient", &|| conv3d_data_grad::<F>(zeros([1, 4, 4, 4, 3]), weight(), &three, 1));
    refused("the weight", &|| conv3d_data_grad::<F>(zeros([1, 4, 4, 4, 4]), weight(), &five, 1));
    refused("the gradient", &|| conv3d_weight_grad::<F>(x(), zeros([1, 4, 4, 4, 3]), [4, 2, 3, 3, 3], &three, 1));
    refused("the weight", &|| conv3d_weight_grad::<F>(x(), zeros([1, 4, 4, 4, 4]), [4, 2, 5, 5, 5], &three, 1));
    refused("a box", &|| max_pool3d::<F>(x(), &three.map(|a| WindowAxis { input: 5, ..a }), [0; 3], [6; 3]).0);
    refused("the gradient", &|| avg_pool3d_grad::<F>(zeros([1, 2, 4, 4, 5]), &three, Count::Inside));
    // What fits is taken.
    assert_eq!(back(conv3d::<F>(x(), weight(), None, &three, 1)), vec![0.0; 4 * 64]);
}
